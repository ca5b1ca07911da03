"""Joins the answers of the agents of several hosts into those of one agent. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....wire.code_files import FilesAnswer
from ....wire.codec import Parcel
from ....wire.hosts import AgentAddress
from ....wire.messages import Progress, Respawned, RespawnFailed
from ....wire.status import HostReport, RankInfo


class HostReports:
    """The questions for reports that agents have not all answered, and what each host has said
    last.

    Attributes:
        silent: the hosts that are not heard at the moment, whose answers nobody waits for.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, HostReport]] = {}
        self._last: dict[int, tuple[RankInfo, ...]] = {}
        self._why_lost: dict[int, str] = {}
        self.silent: set[int] = set()

    def begin(self, request: int) -> None:
        """Note a question that goes to all hosts."""
        self._open[request] = {}

    def note(self, index: int, report: HostReport) -> None:
        """Note a host's answer."""
        if report.request in self._open:
            self._open[report.request][index] = report
        self.note_ranks(index, report.ranks)

    def note_ranks(self, index: int, ranks: Sequence[RankInfo]) -> None:
        """Note what a host says of its ranks without a question."""
        self._last[index] = tuple(ranks)

    def note_lost(self, index: int, why: str) -> None:
        """Note that a host is lost, and how."""
        self.silent.discard(index)
        self._why_lost[index] = why

    def forget(self, index: int) -> None:
        """Forget a host that leaves the mesh, as another host may have its place later."""
        self.silent.discard(index)
        self._last.pop(index, None)
        self._why_lost.pop(index, None)

    def take(self, agents: Sequence[AgentAddress], hosts: Collection[int]) -> Iterator[HostReport]:
        """Yield the joined answers to questions that no host has still to answer.

        Args:
            agents: one a host.
            hosts: those of them that are not lost.
        """
        for request, answers in list(self._open.items()):
            if set(hosts) - self.silent <= answers.keys():
                del self._open[request]
                others = self._not_heard([i for i in hosts if i not in answers])
                lost = [i for i in range(len(agents)) if i not in hosts]
                ranks = (*others, *self.lost_ranks(agents, lost))
                yield join_reports(request, answers.values(), ranks)

    def lost_ranks(self, agents: Sequence[AgentAddress], lost: Iterable[int]) -> Iterator[RankInfo]:
        """Yield the ranks of lost hosts, which count as dead."""
        for index in lost:
            host, why = agents[index].host, self._why_lost.get(index, "")
            ending = f"was on {host}, which is lost" + (f": {why}" if why else "")
            for rank in agents[index].ranks:
                yield RankInfo(rank, 0, host, "dead", ending=ending)

    def _not_heard(self, hosts: Iterable[int]) -> Iterator[RankInfo]:
        for index in hosts:
            for info in self._last.get(index, ()):
                yield msgspec.structs.replace(info, is_heard=False)


def join_reports(
    request: int, reports: Iterable[HostReport], others: Iterable[RankInfo] = ()
) -> HostReport:
    """Return the hosts' answers to one question as one, with the ranks in their order.

    Args:
        request: the question's number.
        reports: the answers.
        others: the ranks of hosts that have not answered.
    """
    reports = list(reports)
    infos = [*(info for report in reports for info in report.ranks), *others]
    ranks = sorted(infos, key=lambda info: info.rank)
    return HostReport(request, tuple(ranks), max((report.at_s for report in reports), default=0.0))


class RespawnAnswers:
    """The answers to one order to fork ranks again, until every host has answered it."""

    def __init__(self) -> None:
        self._awaited: dict[int, tuple[int, ...]] = {}  # host -> ranks that it is to fork
        self._respawned: tuple[RankInfo, ...] = ()
        self._failed: tuple[int, ...] = ()
        self._why = ""

    def begin(
        self, awaited: Mapping[int, tuple[int, ...]], gone: tuple[int, ...], why_gone: str
    ) -> list[Parcel[Any]]:
        """Note an order.

        Args:
            awaited: by host, the ranks that it is to fork.
            gone: the ranks whose hosts are lost.
            why_gone: says so; "" if there are none.

        Returns:
            What the controller is to hear, if no host is awaited.
        """
        self._awaited, self._respawned = dict(awaited), ()
        self._failed, self._why = gone, why_gone
        return self._take()

    def succeeded(self, index: int, infos: tuple[RankInfo, ...]) -> list[Parcel[Any]]:
        """Note that a host has forked its ranks; return what the controller is to hear."""
        self._respawned += infos
        self._awaited.pop(index, None)
        return self._take()

    def failed(self, index: int, ranks: tuple[int, ...], why: str) -> list[Parcel[Any]]:
        """Note that a host could not fork ranks; return what the controller is to hear."""
        self._failed += ranks
        self._why = "; ".join(filter(None, [self._why, why]))
        self._awaited.pop(index, None)
        return self._take()

    def lost(self, index: int, name: str) -> list[Parcel[Any]]:
        """Note that a host is lost; return what the controller is to hear if it was awaited."""
        if index not in self._awaited:
            return []
        return self.failed(index, self._awaited[index], f"{name} is lost")

    def _take(self) -> list[Parcel[Any]]:
        up: list[Parcel[Any]] = []
        if self._awaited:
            return up
        if self._failed:  # first, as it ends the recovery's wait; the others join the next
            up.append(Parcel(RespawnFailed(self._failed, self._why)))
        if self._respawned:
            up.append(Parcel(Respawned(self._respawned)))
        self._respawned, self._failed = (), ()
        return up


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


# The stages of a start, in their order.
_STAGES = ("importing torch", "forking ranks", "process group")


def join_progress(said: Sequence[Progress | None]) -> Progress:
    """Return how far a start has come on all hosts: as far as on the slowest one.

    Args:
        said: by each host; None by one that has said nothing yet.
    """
    stages = [progress.stage if progress else _STAGES[0] for progress in said]
    num_ready = sum(progress.num_ready for progress in said if progress is not None)
    return Progress(min(stages, key=_order_of), num_ready)


def _order_of(stage: str) -> int:
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)
