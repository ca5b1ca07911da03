"""Equal lines of eight hosts are shown once; equal messages of a host's ranks travel as one."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

from cellmesh.controller.output.console import ConsoleSink
from cellmesh.controller.output.fold import HOLD_HOSTS_S
from cellmesh.controller.output.printer import Printer
from cellmesh.controller.session.hosts.fan import Fan
from cellmesh.wire.attach import Welcome
from cellmesh.wire.codec import Parcel
from cellmesh.wire.hosts import Host
from cellmesh.wire.messages import Done, Failed, Ranked
from cellmesh.wire.user_code import Output
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
            Host(f"h{i}", f"tcp://10.0.0.{i}:1", "k", i * PER_HOST, PER_HOST)
            for i in range(NUM_HOSTS)
        ]
        self._mergers = [Merger() for _ in agents]
        self._fan = Fan(agents)
        for index in range(NUM_HOSTS):
            self._fan.join(index, Parcel(Welcome(protocol=1, agent_pid=1, host="x")))
            self._mergers[index].expect(1, PER_HOST)
        self._text = io.StringIO()
        self.printer = Printer(RANKS, ConsoleSink(self._text, self._text), hold_s=HOLD_HOSTS_S)
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
                    self.printer.settle(ranked.ranks, ranked.verb, now)
                else:
                    self.printer.feed(ranked.ranks, ranked.verb, now)
        self.printer.show(now)

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


def test_equal_lines_of_all_ranks_are_shown_once_with_all_ranks() -> None:
    hosts = Hosts()
    for rank in RANKS:
        hosts.say(rank, *in_pieces(rank), Done(1))
    for index in range(NUM_HOSTS):
        hosts.deliver(index, 0.2 * index / NUM_HOSTS)  # the last is 0.2 s away
    assert hosts.text.splitlines() == [f"[0-63] {line.strip()}" for line in LINES]


def test_odd_line_of_one_rank_unfolds_no_other() -> None:
    hosts = Hosts()
    for rank in RANKS:
        odd = [Output(1, "stdout", "odd\n")] if rank == 37 else []
        hosts.say(rank, Output(1, "stdout", "a\n"), *odd, Output(1, "stdout", "b\n"), Done(1))
    for index in range(NUM_HOSTS):
        hosts.deliver(index, 0.0)
    hosts.printer.finish(1.0)
    assert hosts.text.splitlines() == ["[0-63] a", "[37] odd", "[0-63] b"]
    assert hosts.num_messages <= 3 * (NUM_HOSTS + 1), "whole messages that are equal are one"
