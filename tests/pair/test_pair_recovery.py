"""Both sides of a mesh in memory: the recoveries that the core's tests have, too."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from cellmesh.controller.core.core import Effect
from cellmesh.wire.ranks import parse_ranks

from ..support.recovery_scenarios import SCENARIOS, check
from ..support.scripted import World


class Driven(World):
    """A mesh that a scenario drives; its ranks answer what a recovery asks by themselves."""

    def __init__(self, num_ranks: int, options: dict[str, bool]) -> None:
        self.seen: list[Effect] = []
        super().__init__(num_ranks, **options)
        self.start()
        self.seen.clear()

    def carry_out(self, effects: Sequence[Effect]) -> None:
        self.seen += effects
        super().carry_out(effects)

    def happen(self, event: str) -> None:
        words = re.fullmatch(r"(?:run \d+ on )?(\S+)(?: (done|fail|dies?) ?.*)?(?: cell 3)?", event)
        assert words, event
        ranks = parse_ranks(words[1], self.num_ranks) if words[1][0].isdigit() else ()
        self.deliver()
        match words[2]:
            case "done" | "fail" as how:
                self.deliver()
                for rank in ranks:
                    self.ranks[rank].done() if how == "done" else self.ranks[rank].fail(
                        ValueError()
                    )
            case "die" | "dies":
                for rank in ranks:
                    self.reap(rank, "was killed")
                self.wait(0.5)  # until it is reported
            case _ if ranks:
                self.submit(ranks)
            case _ if event == "heal":
                self.heal()
            case _:
                self.drive()

    def drive(self) -> None:
        """Time passes, and ranks that are forked come up, until nothing more happens."""
        before: dict[int, int] = {}
        self.wait(1.0)
        while before != (pids := {rank: process.pid for rank, process in self.ranks.items()}):
            for rank in pids.keys() - before.keys():
                if self.supervisor.report({})[rank].phase == "starting":
                    self.ranks[rank].ready()
            self.wait(1.0)
            before = pids


@pytest.mark.parametrize("text", SCENARIOS.values(), ids=SCENARIOS)
def test_both_sides_recover(text: str) -> None:
    check(Driven, text)
