"""Transition tables of the core's state machines (recovery, run), and a log of latest transitions.

A row has phases and an event, the next phase ("" for the same one) and an action: a method of
`Recovery` or `Runs`. An event without a row has no effect.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

NUM_KEPT = 100

RecoveryPhase = Literal["calm", "examining", "respawning", "describing", "healing"]
RecoveryEvent = Literal[
    "trouble", "timed out", "abandoned", "looked too early", "no answer", "all well",
    "ranks missing", "ranks without groups", "groups broken", "models half done", "respawned",
    "respawn failed", "failed", "given up", "healed", "reset",
]  # fmt: skip
RunPhase = Literal[
    "waiting", "running", "failing", "releasing", "aligning", "interrupted", "killing"
]
# None of these occurs in a run that is sent and ends without a failure.
RunEvent = Literal[
    "a rank failed", "time is over", "a rank asks the user", "stuck", "interrupted",
    "interrupted at once", "all ranks stand", "interrupted again", "still there",
]  # fmt: skip


def _table(*rows: tuple[str, str, str, str]) -> Mapping[Any, tuple[Any, str]]:
    """Return (phase, event) -> (next phase, action) from rows for one or more phases each."""
    return {
        (phase, event): (then or None, action)
        for phases, event, then, action in rows
        for phase in phases.split()
    }


RECOVERY: Mapping[tuple[RecoveryPhase, RecoveryEvent], tuple[RecoveryPhase | None, str]] = _table(
    ("calm", "trouble", "examining", "begin"),
    ("calm", "timed out", "", "refuse"),
    ("calm", "abandoned", "", "refuse"),
    ("examining respawning describing healing", "trouble", "", "look_again"),
    ("examining respawning describing", "abandoned", "", "stop_asking"),
    ("examining", "no answer", "examining", "examine"),
    ("examining", "ranks missing", "respawning", "respawn"),
    ("examining", "ranks without groups", "describing", "describe"),
    ("examining", "models half done", "healing", "heal"),
    ("examining describing", "groups broken", "healing", "heal"),
    ("examining describing", "all well", "calm", "calm_down"),
    ("examining describing healing", "looked too early", "examining", "examine"),
    ("respawning", "respawned", "examining", "examine"),
    ("respawning", "respawn failed", "examining", "examine"),
    ("describing healing", "failed", "examining", "examine"),
    ("describing healing", "given up", "calm", "calm_down"),
    ("healing", "abandoned", "", "call_off"),
    ("healing", "timed out", "", "heal_timed_out"),
    ("healing", "healed", "calm", "calm_down"),
    ("calm examining respawning describing healing", "reset", "calm", "forget"),
)
RUN: Mapping[tuple[RunPhase, RunEvent], tuple[RunPhase | None, str]] = _table(
    ("waiting running", "a rank failed", "failing", "give_time"),
    ("failing", "time is over", "releasing", "release_rest"),
    ("releasing", "a rank failed", "", "give_time"),
    ("releasing", "time is over", "", "release_rest"),
    ("running", "stuck", "releasing", "release_stuck"),
    ("failing releasing interrupted killing", "stuck", "", "release_stuck"),
    ("failing releasing interrupted killing", "a rank asks the user", "", "give_more_time"),
    ("waiting", "interrupted", "", "pass_over"),
    ("running", "interrupted", "aligning", "align"),
    ("running", "interrupted at once", "interrupted", "interrupt"),
    ("failing releasing", "interrupted", "interrupted", "interrupt"),
    ("interrupted killing", "interrupted", "", "interrupt"),
    # Ranks are interrupted together, each before the same operation: `stopping`.
    ("aligning", "all ranks stand", "interrupted", "strike"),
    ("aligning", "a rank failed", "interrupted", "strike_failing"),
    ("aligning", "interrupted again", "killing", "strike_and_condemn"),
    # Interrupted ranks may take long to end, e.g. to save results, and are not released for that.
    ("interrupted killing", "a rank failed", "", "give_time"),
    ("interrupted killing", "time is over", "", "leave"),
    ("interrupted killing", "interrupted again", "killing", "condemn"),
    ("killing", "still there", "interrupted", "kill"),
)


class Transition(NamedTuple):
    """An event of a run or of the recovery, with the state before and after it.

    Attributes:
        at: time of the event, in seconds.
        subject: the state machine: ``recovery``, or a run.
        state: its state before the event.
        event: name of the event.
        then: its state after the event.
    """

    at: float
    subject: str
    state: str
    event: str
    then: str


TransitionLog: TypeAlias = collections.deque[Transition]


def add_transition(log: TransitionLog, new: Transition) -> None:
    """Log a transition; one that repeats the last one replaces it."""
    if log and log[-1][1:] == new[1:]:
        log.pop()
    log.append(new)


def describe_transitions(transitions: Collection[Transition], now: float) -> list[str]:
    """Return a line of text for each transition: its age, subject, states and event."""
    ages = [f"{now - each.at:.2f} s ago" for each in transitions]
    width = max(map(len, ages), default=0)
    return [
        f"{age:>{width}}  {each.subject}: {each.state} -> {each.then} ({each.event})"
        for age, each in zip(ages, transitions, strict=True)
    ]
