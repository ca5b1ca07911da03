"""Messages by which a stop brings the ranks of a run to the same point of their program.

A rank that receives `Pause` waits before its next operation on a process group, unless it owes one:
an operation that another member of the group has begun and the rank has not, or an optimizer's step
that another rank has completed. It reports its position with `StopState`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .groups import GroupCount
from .verbs import Verb

# Maximum of `StopState.quiet_s`, also its value if there was no operation at all.
QUIET_MAX_S = 3600.0


class StepCount(msgspec.Struct, frozen=True, array_like=True):
    """Number of steps that an optimizer of a rank has completed in one run.

    Attributes:
        optimizer: class of the optimizer, and its number among the run's optimizers of that class.
        num_steps: number of steps that it has completed.
        name: user's name of the optimizer; "" if unknown.
        model: user's name of the model whose parameters it updates; "" if unknown.
    """

    optimizer: str
    num_steps: int
    name: str = ""
    model: str = ""


class Steps(msgspec.Struct, frozen=True, array_like=True):
    """The optimizer steps that a rank has completed in a run: a count for each optimizer, in the
    order of their first steps.
    """

    run: int = -1
    counts: tuple[StepCount, ...] = ()


class Owed(msgspec.Struct, frozen=True, array_like=True):
    """Operations and steps of other ranks that a rank has to catch up with before it may pause.

    Attributes:
        counts: numbers of operations that other members have begun on the rank's groups.
        steps: numbers of steps that other ranks have completed, by `StepCount.optimizer`.
    """

    counts: tuple[GroupCount, ...] = ()
    steps: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.counts or self.steps)


class Pause(Verb, frozen=True):
    """Ask a rank to pause in `run` before its next operation on a process group of several ranks,
    once it has caught up with the other ranks (`owed`), and to report with `StopState` each time it
    pauses or begins an operation.
    """

    run: int
    owed: Owed = Owed()


class StopState(Verb, frozen=True):
    """A rank's report on its position in the run that a `Pause` is to stop.

    Attributes:
        run: the run that is to pause.
        is_paused: whether the rank waits before an operation.
        waits: whether it waits in an operation.
        in_step: whether it is inside an optimizer's step.
        quiet_s: seconds since it began its last operation, at most `QUIET_MAX_S`.
        counts: numbers of operations on all its groups.
        steps: steps that its optimizers have completed.
        has_begun: whether it has begun an operation in the run.
    """

    run: int
    is_paused: bool
    waits: bool
    in_step: bool
    quiet_s: float
    counts: tuple[GroupCount, ...]
    steps: Steps = Steps()
    has_begun: bool = False


def owes(own: Iterable[GroupCount], owed: Iterable[GroupCount]) -> bool:
    """Return whether a rank has begun fewer operations on a group than other members.

    Args:
        own: numbers of operations that the rank has begun, for each of its groups.
        owed: numbers of operations that other members have begun (`Pause`).
    """
    begun = {count.name: count for count in own}
    for needed in owed:
        have = begun.get(needed.name)
        if have is None or have.num_collectives < needed.num_collectives:
            return True
        for numbers, least in (
            (have.num_sent, needed.num_sent),
            (have.num_received, needed.num_received),
        ):
            if least:
                by_peer = dict(numbers)
                if any(by_peer.get(peer, 0) < number for peer, number in least):
                    return True
    return False
