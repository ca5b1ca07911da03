"""Runs and the work of runs, made without a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cellmesh.controller.run import WorkItem
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Channel, Relay
from cellmesh.wire.values import PullNames


def work_item(
    ranks: Sequence[int] = (0, 1), title: str = "the call", is_single: bool = False, **more: Any
) -> WorkItem:
    """Work that gives a value."""
    return WorkItem(
        PullNames(0, "x"), PullNames, tuple(ranks), title=title, is_single=is_single, **more
    )


def relay(
    run: int, ranks: Sequence[int] = (0, 1), channel: Channel = "work", title: str = ""
) -> Parcel[Relay]:
    """The message that gives ranks a run."""
    return work_item(ranks, title, channel=channel).relay(run)


class FakeControl:
    """What a run calls of its session: notes what it was asked.

    Attributes:
        replies: the replies to ranks, as (requests, text, is_end).
        on_reply: called after each.
    """

    def __init__(self, on_interrupt: Callable[[], object] = lambda: None) -> None:
        self.replies: list[tuple[dict[int, int], str, bool]] = []
        self.on_reply: Callable[[], object] = lambda: None
        self._on_interrupt = on_interrupt

    def check_may_wait(self) -> None:
        pass

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        self._on_interrupt()

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        pass

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        self.replies.append((dict(requests), text, is_end))
        self.on_reply()
