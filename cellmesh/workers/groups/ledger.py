"""What a rank's process groups have begun, and whether it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Work

from ...stdlib import threading
from ..spans import Spans
from .cutting import Drain
from .patience import Patience

if TYPE_CHECKING:
    from .healing import HealableGroup


@dataclass(frozen=True)
class Operation:
    """A collective or a message that has been begun and has not come to its end.

    Attributes:
        name: as ``torch.distributed`` calls it.
        group: torch's name of its process group.
        since: when it was begun, by ``time.monotonic``.
    """

    name: str
    group: str
    since: float


@dataclass
class Ledger:
    """What the groups of one process have begun: written with each operation, so kept small.

    Attributes:
        patience: for waits that no cut ends.
        drain: keeps connections that were cut.
        spans: what the rank did lately; told of each operation's begin and end.
        generation: of the groups; 0 until they are healed.
        touched: the groups that have begun collectives since `Groups.mark`.
        last: the last operation of the main thread: label, group, when, and how to reach its Work.
    """

    patience: Patience
    drain: Drain = field(default_factory=Drain)
    spans: Spans = field(default_factory=Spans)
    generation: int = 0
    touched: list[HealableGroup] = field(default_factory=list)
    last: tuple[str, HealableGroup, float, Callable[[], Work | None] | None] | None = None
    is_rebuilding: bool = False
    main_thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)

    def forget(self, group: HealableGroup) -> None:
        """Keep no reference to a group."""
        self.touched = [other for other in self.touched if other is not group]
        group.is_touched = False
        if self.last is not None and self.last[1] is group:
            self.last = None

    def current(self) -> Operation | None:
        """The last operation, if it is under way."""
        last = self.last
        if last is None:
            return None
        label, group, since, find_work = last
        if find_work is not None:
            work = find_work()
            if work is None or has_ended(work):
                return None
        return Operation(label, group.group_name, since)

    def last_begun(self) -> Operation | None:
        """The last operation, ended or not."""
        if self.last is None:
            return None
        label, group, since, _ = self.last
        return Operation(label, group.group_name, since)

    @contextlib.contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Groups are connected anew meanwhile."""
        self.is_rebuilding = True
        try:
            yield
        finally:
            self.is_rebuilding = False


def has_ended(work: Work) -> bool:
    """Whether an operation is over, well or not."""
    try:
        return work.is_completed()
    except Exception:  # an aborted communicator
        return True


def has_ended_well(work: Work) -> bool:
    """Whether an operation is over and gave what it should."""
    try:
        return work.is_completed() and work.wait()  # which does not wait then, but raises what it met
    except Exception:
        return False
