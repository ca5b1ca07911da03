"""Chooses the point at which the ranks of a run are interrupted, so that all end at the same point
of their program (a consistent cut). Pure, as `core.Core`.

Each rank pauses before its next operation on a process group (`wire.stopping.Pause`). A paused rank
owes the operations that other members of its groups have begun and it has not: it goes on until it
has executed them, which may add to the operations that others owe. So does a rank that has made one
optimizer step less than others: ranks of different groups (of FSDP with TP, of a pipeline) may owe
each other no operations on both sides of a step. Once every rank of the run is paused, has ended
the run, or has run Python for `QUIET_S` without an operation, all ranks are interrupted where they
are: no operation is cut in half, so that no connection has to be closed. Ranks that have not paused
after `LIMIT_S` are interrupted where they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from ...wire.groups import GroupCount
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.stopping import Owed, Steps, StopState
from .group_progress import Key

# How long a rank must have run Python without an operation to be interrupted where it is.
QUIET_S = 0.5
LIMIT_S = 1.0
# Limit for ranks inside an optimizer's step: interrupted there, they would keep half of it.
IN_STEP_LIMIT_S = 1.8
# Limit for ranks that run Python after fewer optimizer steps than others.
STEPS_LIMIT_S = 0.9
# How often ranks that are not paused are asked where they are.
LOOK_S = 0.1
# Least time between two checks whether ranks that run Python may end where they are.
EXAMINE_S = 0.02

RankPhase = Literal["asked", "running", "waiting", "paused", "owing", "ended"]
RankEvent = Literal["runs", "waits", "pauses", "owes", "ends"]
# Phases, an event, and the next phase. An event without a row has no effect; a paused rank runs or
# waits again only after a message that it owes operations.
_ROWS: Sequence[tuple[str, RankEvent, RankPhase]] = (
    ("asked waiting owing", "runs", "running"),
    ("asked running owing", "waits", "waiting"),
    ("asked running waiting owing", "pauses", "paused"),
    ("paused", "owes", "owing"),
    ("asked running waiting paused owing", "ends", "ended"),
)
STANDING: Mapping[tuple[str, RankEvent], RankPhase] = {
    (phase, event): then for phases, event, then in _ROWS for phase in phases.split()
}


class Verdict(msgspec.Struct, frozen=True):
    """The decision to interrupt all ranks of the runs that are being stopped.

    Attributes:
        is_aligned: whether no rank is in an operation, and none owes one.
        apart: ranks that have not paused, and are interrupted where they are.
    """

    is_aligned: bool
    apart: tuple[int, ...] = ()


# (group, rank) -> peer -> number of messages.
Book: TypeAlias = dict[tuple[Key, int], dict[int, int]]


class Begun:
    """Numbers of operations that ranks have begun on their process groups and of optimizer steps
    that they have completed, from which follow the operations and steps that each rank has to catch
    up on.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: dict[str, dict[int, int]] = {}  # optimizer -> rank -> number
        self._most_steps: dict[str, int] = {}
        self._collectives: dict[Key, dict[int, int]] = {}
        self._most: dict[Key, int] = {}
        self._keys: dict[int, list[Key]] = {}  # rank -> the groups that it is a member of
        self._sent: Book = {}
        self._received: Book = {}
        self._peers: dict[tuple[Key, int], set[int]] = {}

    def note(self, rank: int, counts: Iterable[GroupCount]) -> set[int]:
        """Record the operations that a rank has begun; return the ranks that may now have more
        operations to catch up on.
        """
        concerned: set[int] = {rank}
        for count in counts:
            key = (count.name, count.ranks)
            if key not in self._collectives:
                self._collectives[key], self._most[key] = {}, 0
                for member in self._members_of(count):
                    self._keys.setdefault(member, []).append(key)
            self._collectives[key][rank] = count.num_collectives
            if count.num_collectives > self._most[key]:
                self._most[key] = count.num_collectives
                concerned.update(self._members_of(count))
            for book, numbers in (self._sent, count.num_sent), (self._received, count.num_received):
                if numbers:
                    book[key, rank] = dict(numbers)
                for peer, _ in numbers:
                    self._peers.setdefault((key, peer), set()).add(rank)
                    concerned.add(peer)
        return concerned

    def _members_of(self, count: GroupCount) -> Iterable[int]:
        return count.ranks or range(self._num_ranks)

    def note_steps(self, rank: int, steps: Steps) -> bool:
        """Record the optimizer steps that a rank has completed; return whether another rank may now
        have more steps to catch up on.
        """
        is_more = False
        for count in steps.counts:
            self._steps.setdefault(count.optimizer, {})[rank] = count.num_steps
            if count.num_steps > self._most_steps.get(count.optimizer, 0):
                self._most_steps[count.optimizer] = count.num_steps
                is_more = True
        return is_more

    def owed_by(self, rank: int) -> Owed:
        """Return the operations and optimizer steps that a rank has to catch up on: other members
        of its groups have begun the operations, or other ranks have completed the steps.
        """
        owed = []
        for key in self._keys.get(rank, ()):
            most = self._most[key]
            is_behind = self._collectives[key].get(rank, 0) < most
            to_send = self._behind(key, rank, self._sent, self._received)
            to_receive = self._behind(key, rank, self._received, self._sent)
            if is_behind or to_send or to_receive:
                owed.append(GroupCount(*key, most, to_send, to_receive))
        # Ranks that differ by more than one step do not step in time with the others.
        steps = tuple(
            (optimizer, most)
            for optimizer, most in self._most_steps.items()
            if self._steps[optimizer].get(rank, 0) == most - 1
        )
        return Owed(tuple(owed), steps)

    def _behind(
        self,
        key: Key,
        rank: int,
        own_book: Book,
        their_book: Book,
    ) -> tuple[tuple[int, int], ...]:
        """Return (peer, number of messages it has begun) for each peer that has begun more messages
        with a rank than the rank has begun with it.
        """
        own = own_book.get((key, rank), {})
        peers = sorted(self._peers.get((key, rank), ()))
        numbers = [(peer, their_book.get((key, peer), {}).get(rank, 0)) for peer in peers]
        return tuple((peer, number) for peer, number in numbers if number > own.get(peer, 0))


class _Rank(msgspec.Struct):
    run: int
    began_at: float  # when its run began
    phase: RankPhase = "asked"
    quiet_s: float = 0.0
    seen_at: float = 0.0
    in_step: bool = False
    steps: Steps = msgspec.field(default_factory=Steps)

    def quiet_from(self, has_met: bool) -> float:
        """Return the time, in seconds, from which the rank counts as quiet: it has run Python
        without an operation for `QUIET_S`.

        Args:
            has_met: whether a rank has begun an operation in its run: this one may then be on its
                way to its first, and time before the run does not count.
        """
        since = self.seen_at - self.quiet_s
        return QUIET_S + (max(since, self.began_at) if has_met else since)


@dataclass
class Stopping:
    """The runs that are being stopped together, and the place in the program that each of their
    ranks has reached.

    Attributes:
        num_ranks: number of ranks of the mesh.
        began_at: when the stop began, in seconds.
        limit_at: when ranks are interrupted where they are, in seconds.
        look_at: when ranks that are not paused are asked again where they are.
        examine_at: when `decide` must be called again, as its last check was put off.
    """

    num_ranks: int
    began_at: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _has_met: bool = False  # whether a rank has begun an operation in its run

    def __post_init__(self) -> None:
        self._begun = Begun(self.num_ranks)
        self.limit_at, self.look_at = self.began_at + LIMIT_S, self.began_at + LOOK_S
        self.examine_at, self._examines_from = math.inf, self.began_at
        # Ranks that have not ended; those of them that are not paused; and those of the latter that
        # cannot be interrupted where they are.
        self._left, self._moving, self._restless = set[int](), set[int](), set[int]()

    def add(self, run: int, ranks: Iterable[int], began_at: float = -math.inf) -> None:
        """Add the ranks of another run that is to be stopped.

        Args:
            run: number of the run.
            ranks: the ranks that execute it.
            began_at: when the run began, in seconds.
        """
        for rank in ranks:
            self._ranks[rank] = _Rank(run, began_at)
            self._sort(rank)

    @property
    def due_at(self) -> float:
        """When `decide` must be called at the latest, in seconds."""
        return min(self.limit_at, self.look_at, self.examine_at)

    def run_of(self, rank: int) -> int:
        """Return the run that is being stopped on a rank."""
        return self._ranks[rank].run

    @property
    def runs(self) -> dict[int, tuple[int, ...]]:
        """The runs that are being stopped, and the ranks of each that have not ended it."""
        return group_ranks({rank: self._ranks[rank].run for rank in sorted(self._left)})

    def report(self, ranks: Sequence[int], state: StopState, now: float) -> dict[int, Owed]:
        """Record reports of ranks; return the paused ranks that are behind other ranks, with the
        operations that each has to catch up on.

        Args:
            ranks: ranks that have sent the same report.
            state: their report.
            now: current time in seconds.
        """
        event: RankEvent = "pauses" if state.is_paused else "waits" if state.waits else "runs"
        concerned: set[int] = set()
        for rank in ranks:
            one = self._ranks.get(rank)
            if one is None or one.run != state.run or one.phase == "ended":
                continue
            one.quiet_s, one.seen_at, one.in_step = state.quiet_s, now, state.in_step
            self._move(rank, event)
            one.steps = state.steps
            concerned |= self._begun.note(rank, state.counts)
            if self._begun.note_steps(rank, state.steps):
                concerned |= self._ranks.keys()
            self._has_met |= state.is_paused or state.has_begun
        return self._owing(concerned)

    def _owing(self, concerned: Collection[int]) -> dict[int, Owed]:
        owing = {}
        for rank in concerned:
            one = self._ranks.get(rank)
            if one is not None and one.phase == "paused" and (owed := self._begun.owed_by(rank)):
                owing[rank] = owed
                self._move(rank, "owes")
        return owing

    def end(self, run: int, ranks: Iterable[int], counts: Iterable[GroupCount]) -> dict[int, Owed]:
        """Record that ranks have ended their run, and the numbers of operations that they have
        begun.

        Returns:
            The paused ranks that owe operations, and which.
        """
        concerned: set[int] = set()
        for rank in ranks:
            if (one := self._ranks.get(rank)) is not None and one.run == run:
                self._move(rank, "ends")
                if counts:
                    concerned |= self._begun.note(rank, counts)
        return self._owing(concerned)

    def _move(self, rank: int, event: RankEvent) -> None:
        one = self._ranks[rank]
        one.phase = STANDING.get((one.phase, event), one.phase)
        self._sort(rank)

    def _sort(self, rank: int) -> None:
        one = self._ranks[rank]
        is_left, is_moving = one.phase != "ended", one.phase not in ("paused", "ended")
        for ranks, is_in in (
            (self._left, is_left),
            (self._moving, is_moving),
            (self._restless, is_moving and (one.phase != "running" or one.in_step)),
        ):
            ranks.add(rank) if is_in else ranks.discard(rank)

    def to_look_at(self, now: float) -> dict[int, tuple[int, ...]]:
        """Return run -> ranks that have not paused and are to be asked where they are."""
        self.look_at = now + LOOK_S
        return group_ranks({rank: self._ranks[rank].run for rank in sorted(self._moving)})

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended its run."""
        return not self._left

    def decide(self, now: float) -> Verdict | None:
        """Return the decision to interrupt all ranks; None while ranks must be waited for."""
        if not self._moving:
            return Verdict(True) if self._left else None
        if now >= self.limit_at:
            in_step = any(self._ranks[rank].in_step for rank in self._moving)
            if in_step and now < self.began_at + IN_STEP_LIMIT_S:
                self.limit_at = now + LOOK_S
                return None
            return Verdict(False, tuple(sorted(self._moving)))
        if self._restless:
            return None
        if now < self._examines_from:
            self.examine_at = self._examines_from
            return None
        self.examine_at = math.inf
        quiet_from = max(self._ranks[rank].quiet_from(self._has_met) for rank in self._moving)
        steps_from = self.began_at + STEPS_LIMIT_S
        if now < quiet_from:
            self._examines_from = min(quiet_from, now + EXAMINE_S)
            return None
        if any(self._begun.owed_by(rank).counts for rank in self._moving):
            self._examines_from = now + EXAMINE_S
            return None
        if now < steps_from and self._steps_differ():
            self._examines_from = min(steps_from, now + EXAMINE_S)
            return None
        return Verdict(True, tuple(sorted(self._moving)) if self._has_met else ())

    def _steps_differ(self) -> bool:
        return bool(describe_steps({rank: self._ranks[rank].steps for rank in sorted(self._left)}))


def describe_steps(steps: Mapping[int, Steps]) -> str:
    """Return a sentence on ranks that have completed different numbers of optimizer steps in a run,
    and on how to make them equal; "" if there are none.

    A rank that has not stepped an optimizer counts if others have made one step at most: otherwise
    the program does not use the optimizer on this rank.

    Args:
        steps: rank -> its steps, all of one run.
    """
    by_optimizer: dict[str, dict[int, int]] = {}
    names: dict[str, tuple[str, str]] = {}
    for rank, of_rank in steps.items():
        for count in of_rank.counts:
            by_optimizer.setdefault(count.optimizer, {})[rank] = count.num_steps
            kind = count.optimizer.partition(" ")[0]
            names.setdefault(count.optimizer, (count.name or kind, count.model))
    found = []
    for optimizer, numbers in by_optimizer.items():
        if max(numbers.values()) <= 1:
            numbers = dict.fromkeys(steps, 0) | numbers
        if len(set(numbers.values())) > 1:
            found.append(_describe_difference(dict(sorted(numbers.items())), *names[optimizer]))
    return "; ".join(found)


def _describe_difference(numbers: Mapping[int, int], name: str, model: str) -> str:
    by_number = group_ranks(numbers)
    each = ", ".join(f"{number} on {describe_ranks(ranks)}" for number, ranks in by_number.items())
    most = max(by_number.values(), key=len)
    remedy = "%dist_check shows whether replicas still agree"
    if model:
        remedy = f"`%dist_sync {model} --from {most[0]}` makes replicas equal"
    return f"ranks have made different numbers of steps: {each} ({name}): {remedy}"
