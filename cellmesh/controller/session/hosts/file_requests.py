"""Requests of the controller about files, which the agents of several hosts answer. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ....wire.code_files import FilesAnswer
from ....wire.codec import Parcel

# How long each answer of hosts that are new may take.
FILES_S = 120.0
# The answers by host; None if the mesh has ended.
Answers = dict[int, FilesAnswer] | None
# Makes the messages to each host, given the request's number and the hosts there are.
Make = Callable[[int, Collection[int]], Mapping[int, Sequence[Parcel[Any]]]]


@dataclass
class _Request:
    hosts: set[int]
    future: Future[Answers]
    answers: dict[int, FilesAnswer] = field(default_factory=dict)


class FileRequests:
    """The requests that wait for agents' answers."""

    def __init__(self) -> None:
        self._open: dict[int, _Request] = {}
        # A late answer to a controller that has gone is not taken for one to its successor.
        self._last = secrets.randbits(40)

    def __bool__(self) -> bool:
        return bool(self._open)

    def begin(
        self, make: Make, hosts: Collection[int], future: Future[Answers]
    ) -> Mapping[int, Sequence[Parcel[Any]]]:
        """Return the messages of a new request; its future gets the answers of all their hosts."""
        self._last += 1
        messages = make(self._last, hosts)
        self._open[self._last] = _Request(set(messages), future)
        self.keep(hosts)
        return messages

    def answer(self, host: int, answer: FilesAnswer) -> None:
        """Note a host's answer."""
        request = self._open.get(answer.request)
        if request is not None:
            request.answers[host] = answer
            self._close_answered()

    def keep(self, hosts: Collection[int]) -> None:
        """Wait no more for hosts that are not among these."""
        for request in self._open.values():
            request.hosts &= set(hosts)
        self._close_answered()

    def awaited(self, future: Future[Answers]) -> list[int]:
        """Return the hosts whose answers a request's future waits for."""
        found = (request for request in list(self._open.values()) if request.future is future)
        return [host for each in found for host in sorted(each.hosts - each.answers.keys())]

    def close(self) -> None:
        """End all requests without an answer."""
        for request in self._open.values():
            request.future.set_result(None)
        self._open.clear()

    def _close_answered(self) -> None:
        for number, request in list(self._open.items()):
            if request.hosts <= request.answers.keys():
                del self._open[number]
                request.future.set_result(request.answers)
