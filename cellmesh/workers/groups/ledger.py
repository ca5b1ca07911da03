"""Records the operations that a rank's process groups have begun, and which have ended."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Work

from ...stdlib import threading
from ...wire.groups import GroupCount
from ..trace.recorder import Spans
from .abort import Drain
from .interruptible_wait import Patience

if TYPE_CHECKING:
    from .healing import HealableGroup


# Of operations that are waited for later, so many are known at a time.
_MAX_EARLIER = 1024


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective or a message in flight.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of its process group.
        since: when it was begun, by ``time.monotonic``.
    """

    name: str
    group: str
    since: float


# An operation's label, its group, when it was begun, and how to reach its Work; None while it is
# called.
Begun = tuple[str, "HealableGroup", float, Callable[[], Work | None] | None]


@dataclass
class Ledger:
    """The operations of one process's groups; updated by each operation, so kept small.

    Attributes:
        patience: for waits that no cut ends.
        drain: keeps connections that were cut.
        spans: what the rank did lately; records each operation's begin and end.
        generation: of the groups; 0 until they are healed.
        touched: the groups that have begun collectives since `mark`.
        last: the last operation of the main thread.
        earlier: those of its operations that were under way when others were begun, oldest first:
            the last one may fail or end while an earlier one is waited for.
    """

    patience: Patience
    drain: Drain = field(default_factory=Drain)
    spans: Spans = field(default_factory=Spans)
    generation: int = 0
    touched: list[HealableGroup] = field(default_factory=list)
    last: Begun | None = None
    earlier: deque[Begun] = field(default_factory=lambda: deque(maxlen=_MAX_EARLIER))
    is_rebuilding: bool = False
    main_thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)

    def keep(self, begun: Begun) -> None:
        """Keep an operation when another one begins, if the first is still in flight."""
        if _is_under_way(begun):
            self.drop_ended()
            self.earlier.append(begun)

    def drop_ended(self) -> None:
        """Drop references to the oldest operations that have ended: a Work holds tensors."""
        earlier = self.earlier
        while earlier and not _is_under_way(earlier[0]):
            earlier.popleft()

    def forget(self, group: HealableGroup) -> None:
        """Drop all references to a group."""
        self.touched = [other for other in self.touched if other is not group]
        group.is_touched = False
        if self.last is not None and self.last[1] is group:
            self.last = None
        self.earlier = deque((one for one in self.earlier if one[1] is not group), _MAX_EARLIER)

    def mark(self) -> None:
        """Start counting at zero for `counts_since_mark`. Main thread."""
        if self.touched:
            for group in self.touched:
                group.is_touched = False
                group.forget_backward()
            self.touched = []
            self.drop_ended()

    def counts_since_mark(self) -> tuple[GroupCount, ...]:
        """The groups on which collectives were begun since `mark`, without messages. Main
        thread.
        """
        return tuple([group.count(with_messages=False) for group in self.touched])

    def forget_operations(self) -> None:
        """Drop all operations, which have ended or are not waited for any more."""
        self.last = None
        self.earlier.clear()

    def current(self) -> CollectiveRecord | None:
        """The last operation, if it is in flight; else the oldest one in flight."""
        last = self.last
        for one in ([last] if last is not None else []) + list(self.earlier):
            if _is_under_way(one):
                label, group, since, _ = one
                return CollectiveRecord(label, group.group_name, since)
        return None

    def last_begun(self) -> CollectiveRecord | None:
        """The last operation, ended or not."""
        if self.last is None:
            return None
        label, group, since, _ = self.last
        return CollectiveRecord(label, group.group_name, since)

    @contextlib.contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Note that groups are being connected again."""
        self.is_rebuilding = True
        try:
            yield
        finally:
            self.is_rebuilding = False


def _is_under_way(begun: Begun) -> bool:
    find_work = begun[3]
    if find_work is None:
        return True
    work = find_work()
    return work is not None and not has_ended(work)


def has_ended(work: Work) -> bool:
    """Whether an operation has ended, with success or failure."""
    try:
        return work.is_completed()
    except Exception:  # an aborted communicator
        return True


def has_ended_well(work: Work) -> bool:
    """Whether an operation has succeeded."""
    try:
        return (
            work.is_completed() and work.wait()
        )  # which does not wait then, but raises what it met
    except Exception:
        return False
