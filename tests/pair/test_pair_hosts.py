"""Equal lines of eight hosts are shown once; equal messages of a host's ranks travel as one."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.fold import HOLD_HOSTS_S
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.session.hosts.fan import Fan
from cellmesh.wire.attach import Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import Host
from cellmesh.wire.messages import Done, Failed, Ranked
from cellmesh.wire.user_code import Display, Output
from cellmesh.workers.agent.merger import Merger

NUM_HOSTS, PER_HOST = 8, 8
RANKS = range(NUM_HOSTS * PER_HOST)
LINES = [f"step {number}\n" for number in range(50)]
LATER = 1e6


class Hosts:
    """Eight agents' mergers, the controller's fan, and what is shown of one run on all ranks.

    Attributes:
        num_messages: that have travelled between hosts.
    """

    def __init__(self) -> None:
        agents = [
            Host(f"h{i}", f"tcp://10.0.0.{i + 1}:1", "k", i * PER_HOST, PER_HOST)
            for i in range(NUM_HOSTS)
        ]
        self._mergers = [Merger() for _ in agents]
        self._fan = Fan(agents)
        for index in range(NUM_HOSTS):
            self._fan.join(index, Parcel(Welcome(protocol=1, agent_pid=1, host="x")))
            self._mergers[index].expect(1, PER_HOST)
        self._text = io.StringIO()
        sink = ConsoleSink(self._text, self._text)
        self._printer = Printer(RANKS, sink, hold_s=HOLD_HOSTS_S)
        self.num_messages = 0

    def say(self, rank: int, *verbs: Any) -> None:
        for verb in verbs:
            self._mergers[rank // PER_HOST].add(rank, Parcel(verb), 0.0)

    def deliver(self, index: int, now: float) -> None:
        """Deliver what a host's agent has gathered."""
        for parcel in self._mergers[index].take(LATER):
            self.num_messages += 1
            for up in self._fan.join(index, parcel).up:
                ranked = up.verb
                assert isinstance(ranked, Ranked)
                if isinstance(ranked.verb, Done | Failed):
                    self._printer.settle(ranked.ranks, ranked.verb, now)
                else:
                    self._printer.feed(ranked.ranks, ranked.verb, now)
        self._printer.show(now)

    def finish(self) -> None:
        self._printer.finish(1.0)

    @property
    def text(self) -> str:
        return self._text.getvalue()


def in_pieces(rank: int) -> Iterator[Output]:
    """Yield the lines in pieces of the rank's own, as its thread that sends them happens to run."""
    at = 0
    for size in itertools.cycle((1 + rank % 5, 2, 1 + rank % 3)):
        if at >= len(LINES):
            return
        yield Output(1, "stdout", "".join(LINES[at : at + size]))
        at += size


SAYINGS: dict[str, tuple[Callable[[int], Sequence[Any]], int]] = {
    "lines": (lambda rank: [*in_pieces(rank)], len(LINES)),
    "traceback": (lambda rank: [Failed(1, "ValueError", "no", "ValueError: no", 1)], 1),
    "display": (
        lambda rank: [Display(1, "result", b'{"data": {"text/plain": "5"}, "metadata": {}}')],
        1,
    ),
}


@pytest.mark.parametrize("what", SAYINGS)
def test_what_all_ranks_say_is_shown_once_with_all_ranks(what: str) -> None:
    said, num_lines = SAYINGS[what]
    hosts = Hosts()
    for rank in RANKS:
        hosts.say(rank, *said(rank))
        if what != "traceback":
            hosts.say(rank, Done(1))
    for index in range(NUM_HOSTS):
        hosts.deliver(index, 0.2 * index / NUM_HOSTS)  # the last is 0.2 s away
    shown = hosts.text.splitlines()
    assert len(shown) == num_lines
    assert all(line.startswith("[0-63] ") for line in shown)
    if what != "lines":  # which each rank cuts in its own way
        assert hosts.num_messages <= 2 * NUM_HOSTS


def test_odd_line_of_one_rank_unfolds_no_other() -> None:
    hosts = Hosts()
    for rank in RANKS:
        odd = [Output(1, "stdout", "odd\n")] if rank == 37 else []
        hosts.say(rank, Output(1, "stdout", "a\n"), *odd, Output(1, "stdout", "b\n"), Done(1))
    for index in range(NUM_HOSTS):
        hosts.deliver(index, 0.0)
    hosts.finish()
    assert hosts.text.splitlines() == ["[0-63] a", "[37] odd", "[0-63] b"]
    assert hosts.num_messages <= 3 * (NUM_HOSTS + 1), "whole messages that are equal are one"
