"""The tables of the core's state machines (recovery, run), and a log of the last transitions.

A row has a state and an event, then the state that is entered (None: it stays as it is) and what is
done. `Recovery` and `Runs` have a method for each action; an event without a row does nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

NUM_KEPT = 100

RecoveryPhase = Literal[
    "calm",
    "examining",
    "respawning",
    "describing",
    "healing",
]
RecoveryEvent = Literal[
    "trouble",
    "timed out",
    "abandoned",
    "looked too early",
    "no answer",
    "all well",
    "ranks missing",
    "ranks without groups",
    "groups broken",
    "models half done",
    "respawned",
    "respawn failed",
    "failed",
    "given up",
    "healed",
    "reset",
]
RecoveryAction = Literal[
    "begin",
    "refuse",
    "look_again",
    "stop_asking",
    "examine",
    "calm_down",
    "respawn",
    "describe",
    "heal",
    "reset_models",
    "give_up_respawn",
    "call_off",
    "heal_timed_out",
    "forget",
]
RECOVERY: Mapping[
    tuple[RecoveryPhase, RecoveryEvent], tuple[RecoveryPhase | None, RecoveryAction]
] = {
    ("calm", "trouble"): ("examining", "begin"),
    ("calm", "timed out"): (None, "refuse"),
    ("calm", "abandoned"): (None, "refuse"),
    ("calm", "reset"): ("calm", "forget"),
    ("examining", "trouble"): (None, "look_again"),
    ("examining", "abandoned"): (None, "stop_asking"),
    ("examining", "looked too early"): ("examining", "examine"),
    ("examining", "no answer"): ("examining", "examine"),
    ("examining", "all well"): ("calm", "calm_down"),
    ("examining", "ranks missing"): ("respawning", "respawn"),
    ("examining", "ranks without groups"): ("describing", "describe"),
    ("examining", "groups broken"): ("healing", "heal"),
    ("examining", "models half done"): ("healing", "reset_models"),
    ("examining", "reset"): ("calm", "forget"),
    ("respawning", "trouble"): (None, "look_again"),
    ("respawning", "abandoned"): (None, "stop_asking"),
    ("respawning", "respawned"): ("examining", "examine"),
    ("respawning", "respawn failed"): ("examining", "examine"),
    ("respawning", "timed out"): (None, "give_up_respawn"),
    ("respawning", "reset"): ("calm", "forget"),
    ("describing", "trouble"): (None, "look_again"),
    ("describing", "abandoned"): (None, "stop_asking"),
    ("describing", "groups broken"): ("healing", "heal"),
    ("describing", "failed"): ("examining", "examine"),
    ("describing", "looked too early"): ("examining", "examine"),
    ("describing", "all well"): ("calm", "calm_down"),
    ("describing", "given up"): ("calm", "calm_down"),
    ("describing", "reset"): ("calm", "forget"),
    ("healing", "trouble"): (None, "look_again"),
    ("healing", "abandoned"): (None, "call_off"),
    ("healing", "timed out"): (None, "heal_timed_out"),
    ("healing", "healed"): ("calm", "calm_down"),
    ("healing", "failed"): ("examining", "examine"),
    ("healing", "looked too early"): ("examining", "examine"),
    ("healing", "given up"): ("calm", "calm_down"),
    ("healing", "reset"): ("calm", "forget"),
}
# A run that is sent and ends as it should has none of these events.
RunPhase = Literal[
    "waiting",
    "running",
    "failing",
    "reported",
    "releasing",
    "aligning",
    "interrupted",
    "killing",
]
RunEvent = Literal[
    "a rank failed",
    "time is over",
    "time is over, nobody is released",
    "a rank asks the user",
    "stuck",
    "interrupted",
    "interrupted at once",
    "all ranks stand",
    "interrupted again",
    "still there",
]
RunAction = Literal[
    "give_time", "give_more_time", "release_rest", "release_stuck", "report", "leave", "pass_over",
    "align", "strike", "strike_failing", "strike_and_condemn", "interrupt", "condemn", "kill",
]  # fmt: skip
RUN: Mapping[tuple[RunPhase, RunEvent], tuple[RunPhase | None, RunAction]] = {
    ("waiting", "a rank failed"): ("failing", "give_time"),
    ("waiting", "interrupted"): (None, "pass_over"),
    ("running", "a rank failed"): ("failing", "give_time"),
    ("running", "stuck"): ("releasing", "release_stuck"),
    ("running", "interrupted"): ("aligning", "align"),
    ("running", "interrupted at once"): ("interrupted", "interrupt"),
    # Ranks end together before the same operation: `stopping`.
    ("aligning", "all ranks stand"): ("interrupted", "strike"),
    ("aligning", "a rank failed"): ("interrupted", "strike_failing"),
    ("aligning", "interrupted again"): ("killing", "strike_and_condemn"),
    ("failing", "time is over"): ("releasing", "release_rest"),
    ("failing", "time is over, nobody is released"): ("reported", "report"),
    ("failing", "a rank asks the user"): (None, "give_more_time"),
    ("failing", "stuck"): (None, "release_stuck"),
    ("failing", "interrupted"): ("interrupted", "interrupt"),
    ("reported", "a rank failed"): ("failing", "give_time"),
    ("reported", "interrupted"): ("interrupted", "interrupt"),
    ("releasing", "a rank failed"): (None, "give_time"),
    ("releasing", "time is over"): (None, "release_rest"),
    ("releasing", "a rank asks the user"): (None, "give_more_time"),
    ("releasing", "stuck"): (None, "release_stuck"),
    ("releasing", "interrupted"): ("interrupted", "interrupt"),
    # What the ranks save now is their affair.
    ("interrupted", "a rank failed"): (None, "give_time"),
    ("interrupted", "time is over"): (None, "leave"),
    ("interrupted", "time is over, nobody is released"): (None, "report"),
    ("interrupted", "a rank asks the user"): (None, "give_more_time"),
    ("interrupted", "stuck"): (None, "release_stuck"),
    ("interrupted", "interrupted"): (None, "interrupt"),
    ("interrupted", "interrupted again"): ("killing", "condemn"),
    ("killing", "a rank failed"): (None, "give_time"),
    ("killing", "time is over"): (None, "leave"),
    ("killing", "time is over, nobody is released"): (None, "report"),
    ("killing", "a rank asks the user"): (None, "give_more_time"),
    ("killing", "stuck"): (None, "release_stuck"),
    ("killing", "interrupted"): (None, "interrupt"),
    ("killing", "interrupted again"): (None, "condemn"),
    ("killing", "still there"): ("interrupted", "kill"),
}


class Transition(NamedTuple):
    """An event of a run or of the recovery, with the state before and after it.

    Attributes:
        at: when, in seconds.
        subject: what has the state: ``recovery``, or a run.
        state: before the event.
        event: what happened.
        then: the state after the event.
    """

    at: float
    subject: str
    state: str
    event: str
    then: str


class TransitionLog:
    """The last transitions of runs and of the recovery, the oldest first."""

    def __init__(self) -> None:
        self._kept: collections.deque[Transition] = collections.deque(maxlen=NUM_KEPT)

    def add(self, at: float, subject: str, state: str, event: str, then: str) -> None:
        """Log a transition; if it repeats the last one, replace that one."""
        last = self._kept[-1] if self._kept else None
        if last is not None and last[1:] == (subject, state, event, then):
            self._kept.pop()
        self._kept.append(Transition(at, subject, state, event, then))

    def all(self) -> tuple[Transition, ...]:
        """Return the logged transitions, the oldest first."""
        return tuple(self._kept)


def describe_transitions(transitions: Sequence[Transition], now: float) -> list[str]:
    """Return a line of text for each transition: its age, subject, states and event."""
    ages = [f"{now - each.at:.2f} s ago" for each in transitions]
    width = max(map(len, ages), default=0)
    return [
        f"{age:>{width}}  {each.subject}: {each.state} -> {each.then} ({each.event})"
        for age, each in zip(ages, transitions, strict=True)
    ]
