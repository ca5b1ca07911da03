"""Recoveries as a user sees them, for a core alone and for both sides in memory (`core_script` has
the language). What each ``drive`` leads to stands behind its arrow: reports, notes, ends of runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cellmesh.controller.core.core import Effect

from .core_script import describe

SHOWN = ("report", "note", "finish", "healed")

SCENARIOS = {
    "nothing is broken": """2 ranks
        heal; drive -> report nothing to do
        run 1 on 0-1; 0 fail 1; 1 done 1; drive -> finish 1
        run 2 on 0-1; 0-1 done 2; drive -> finish 2""",
    "a dead rank is replaced once the user asks": """3 ranks
        1 dies; drive -> healed: healed, dead 1
        heal; drive -> healed: new 1, healed; report new 1, healed
        run 1 on 0-2; 0-2 done 1; drive -> finish 1""",
    "all ranks are replaced": """2 ranks
        0-1 die; drive -> -
        heal; drive -> healed: new 0-1, healed; report new 0-1, healed""",
    "a dead rank is replaced at once": """3 ranks auto_heal=True
        1 dies; run 1 on 0-2; drive -> healed: new 1, healed
        0-2 done 1; drive -> finish 1""",
    "a death in a run": """3 ranks
        run 1 on 0-2; 1 dies; 0 fail 1; 2 done 1; drive -> finish 1; note 1: rank 1 is dead...
        run 2 on 0-2; 0,2 done 2; drive -> finish 2
        heal; drive -> healed: new 1, healed; report new 1, healed""",
    "a heal waits for ranks that leave a failed run": """3 ranks
        run 1 on 0-2; 1 dies; heal; 0,2 fail 1; drive -> finish 1; note 1: rank 1 is new...; ...""",
    "and not for others": """3 ranks
        run 1 on 0,2 cell 3; heal; drive -> report failure: ranks 0,2 must be idle for that...
        0,2 done 1; heal; drive -> finish 1; report nothing to do""",
    "a rank dies during a heal": """4 ranks
        1 dies; drive -> healed: healed, dead 1
        heal; 2 dies; drive -> healed: new 1-2, healed; report new 1-2, healed""",
    "a run is held back after a failure": """2 ranks
        run 1 on 0-1; run 2 on 0-1; 0 fail 1; drive -> -
        1 done 1; drive -> finish 1
        0-1 done 2; drive -> finish 2""",
}


class Driver(Protocol):
    """A mesh in which a scenario happens; `seen` are the decisions of its core."""

    seen: list[Effect]

    def happen(self, event: str) -> None: ...


def check(make: Callable[[int, dict[str, bool]], Driver], text: str) -> None:
    """Run a scenario, and check what each of its ``drive`` leads to."""
    head, _, lines = text.partition("\n")
    driver = make(int(head.split()[0]), {"auto_heal": "auto_heal" in head})
    for events, expected in _lines(lines):
        for event in events.split(";"):
            driver.happen(event.strip())
        found = "; ".join(_shown(driver.seen)) or "-"
        driver.seen.clear()
        pattern = ".*".join(map(re.escape, expected.strip().split("...")))
        assert re.fullmatch(pattern, found), f"{events}\n   but: {found}"


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        events, _, expected = line.partition("->")
        yield events, expected


def _shown(effects: Iterable[Effect]) -> list[str]:
    return [each for each in describe(effects) if each.startswith(SHOWN)]
