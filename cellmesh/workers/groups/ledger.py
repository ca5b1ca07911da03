"""Records which operations a rank has begun on its process groups, and which have ended."""

from __future__ import annotations

import threading as plain_threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from ...stdlib import time
from ...wire.groups import Begun, GroupCount, InFlight, label_of
from ...wire.trace import What
from ..trace.recorder import Spans
from .connections import KeptConnections
from .gate import Gate
from .waits import Waits

# Of operations that are waited for later, so many are known at a time.
_MAX_EARLIER = 1024
# How often operations in flight are looked at.
_LOOK_S = 0.002
MESSAGES = frozenset({"send", "recv", "recv_anysource"})
# So many collectives of a group are known: where ranks have parted, one may be some ahead.
NUM_RECENT = 8

Signature = tuple[int, Any, int]  # number of elements, dtype, and root in the group
Signed = tuple[int, str, int, Any, int]  # with number and name of the collective before it
_NOTHING: Signature = (-1, None, -1)
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# Where ranks may take and give different amounts, what the inputs are made of is equal.
_BY_INPUT = frozenset({"gather", "reduce_scatter"})
_WITHOUT_TENSORS = frozenset({"barrier", "monitored_barrier"})


class GroupRecord:
    """The operations that this rank has begun on one process group since it was made or healed.

    Args:
        name, description: torch's.
        ranks: the mesh's ranks of its members; () for all.
        gives_up_soon: returns whether the group's own time-out ends a wait before long.
    """

    def __init__(
        self,
        name: str,
        description: str,
        ranks: tuple[int, ...],
        gives_up_soon: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name, self.description, self.ranks = name, description, ranks
        self.gives_up_soon = gives_up_soon
        self.num_doubts = 0  # of the ledger's, when a collective was compared last
        self.restart()

    def restart(self) -> None:
        """Begin to count, as the group is connected or taken down."""
        self.num_collectives = 0
        self.recent: deque[Signed] = deque(maxlen=NUM_RECENT)
        self.whats: dict[str, What] = {}
        self.is_touched = False
        self.num_sent: dict[int, int] = {}
        self.num_received: dict[int, int] = {}
        self.from_anyone: list[Work] = []
        self.backward_work: Work | None = None

    @property
    def label(self) -> str:
        """What users call the group."""
        return label_of(self.description, self.ranks)

    def global_rank(self, rank: int) -> int:
        """Return the mesh's rank of the member with this rank in the group."""
        return self.ranks[rank] if self.ranks else rank

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether the last operation of DDP's backward pass failed to reduce gradients."""
        work = self.backward_work
        try:  # an ended Work's `wait` does not wait, but raises its error
            return work is not None and not (work.is_completed() and work.wait())
        except Exception:
            return True

    def count(self, with_messages: bool = True, with_recent: bool = False) -> GroupCount:
        """Return how many operations this rank began on the group since it was made or healed."""
        if not with_messages:
            return GroupCount(self.name, self.ranks, self.num_collectives)
        self.settle_from_anyone()
        recent: list[Signed] = _copied(self.recent) if with_recent else []
        return GroupCount(
            self.name,
            self.ranks,
            self.num_collectives,
            tuple(sorted(self.num_sent.items())),
            tuple(sorted(self.num_received.items())),
            self.description,
            tuple(as_begun(*one, self.ranks) for one in recent),
        )

    def settle_from_anyone(self) -> None:
        """Count ended receives from any rank for the ranks whose messages they received."""
        pending, self.from_anyone = self.from_anyone, []
        for work in pending:
            if not work.is_completed():
                self.from_anyone.append(work)
            elif (source := work._source_rank()) >= 0:
                source = self.global_rank(source)
                self.num_received[source] = self.num_received.get(source, 0) + 1


class Operation:
    """An operation that this rank has begun.

    Attributes:
        name: as ``torch.distributed`` calls it.
        record: of its process group.
        since: when it was begun, by ``time.monotonic``.
        find_work: returns its Work, or None if that is not held any more, which has ended then;
            None until the call that begins it has returned.
        number: among the group's collectives, or among the messages with its peer.
        peer: of a message; -1 if there is none.
    """

    __slots__ = ("find_work", "name", "number", "peer", "record", "since")

    def __init__(
        self, name: str, record: GroupRecord, since: float, number: int = 0, peer: int = -1
    ) -> None:
        self.name, self.record, self.since = name, record, since
        self.number, self.peer = number, peer
        self.find_work: Callable[[], Work | None] | None = None

    @property
    def group(self) -> str:
        """torch's name of its process group."""
        return self.record.name

    @property
    def is_under_way(self) -> bool:
        """Whether it has not ended."""
        if self.find_work is None:
            return True
        work = self.find_work()
        try:
            return work is not None and not work.is_completed()
        except Exception:  # an aborted communicator
            return False


@dataclass
class Ledger:
    """The collectives, sends and receives that this process has begun, by group. Every operation
    updates the ledger, so an update must be cheap.
    """

    waits: Waits
    kept: KeptConnections = field(default_factory=KeptConnections)
    spans: Spans = field(default_factory=Spans)
    generation: int = 0  # of the groups; 0 until they are healed
    # Counts the stops and heals after which ranks may go on from different places: the next
    # collective on each group is compared, by this function.
    num_doubts: int = 0
    compare_first: Callable[[GroupRecord, Signed, int], None] = lambda record, signed, size: None
    # The groups that have begun collectives since `mark`.
    touched: list[GroupRecord] = field(default_factory=list)
    last: Operation | None = None  # of the main thread, ended or not
    before_run: float = 0.0  # when the last one before the current run was begun
    # Those that were under way when others were begun, oldest first: the last one may fail or end
    # while an earlier one is waited for.
    earlier: deque[Operation] = field(default_factory=lambda: deque(maxlen=_MAX_EARLIER))
    main_thread: int = field(default_factory=lambda: plain_threading.main_thread().ident or 0)
    gate: Gate = field(init=False)  # where a stop pauses the rank

    def __post_init__(self) -> None:
        self.gate = Gate(self.main_thread)

    def begin(self, operation: Operation) -> None:
        """Note the operation that the main thread begins, and keep the last one's record while that
        is in flight.
        """
        last, self.last = self.last, operation
        if last is not None and last.is_under_way:
            self.drop_ended()
            self.earlier.append(last)

    def drop_ended(self) -> None:
        """Drop records of the oldest operations that have ended, as a Work holds tensors."""
        earlier = self.earlier
        while earlier and not earlier[0].is_under_way:
            earlier.popleft()

    def forget(self, record: GroupRecord) -> None:
        """Drop all records of operations of a group."""
        self.touched = [other for other in self.touched if other is not record]
        record.is_touched = False
        if self.last is not None and self.last.record is record:
            self.last = None
        kept = [one for one in self.earlier if one.record is not record]
        self.earlier = deque(kept, _MAX_EARLIER)

    def mark(self) -> None:
        """Begin what `counts_since_mark` counts from. Main thread."""
        if self.touched:
            for record in self.touched:
                record.is_touched = False
                if not record.has_failed_in_backward:
                    record.backward_work = None  # it holds gradients
            self.touched = []
            self.drop_ended()

    def counts_since_mark(self) -> tuple[GroupCount, ...]:
        """Return the numbers of collectives on the groups used since `mark`. Main thread."""
        return tuple([record.count(with_messages=False) for record in self.touched])

    def forget_operations(self) -> None:
        """Drop all records of operations: they have ended or are not waited for any more."""
        self.last = None
        self.earlier.clear()

    def await_operations(self, timeout_s: float) -> None:
        """Wait until the collectives that are in flight have ended, well or not; raise TimeoutError
        after `timeout_s`. Main thread.

        gloo reports the end of messages only after a ``wait``. They arrive in tensors that nothing
        else uses.
        """
        deadline = time.monotonic() + timeout_s
        for operation in self._oldest_first():
            while operation.name not in MESSAGES and operation.is_under_way:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"an {operation.name} of {operation.group} did not end")
                time.sleep(_LOOK_S)

    def current(self) -> Operation | None:
        """Return the operation begun last, if it is in flight; else the oldest one in flight."""
        last = self.last
        candidates = ([last] if last is not None else []) + _copied(self.earlier)
        return next((one for one in candidates if one.is_under_way), None)

    def last_collective(self) -> tuple[Begun | None, str]:
        """Return the collective that this rank has begun last, ended or not, and what users call
        its group; None and "" if it has begun a message since.
        """
        last = self.last
        if last is None or last.name in MESSAGES:
            return None, ""
        recent = last.record.count(with_recent=True).recent
        begun = next((one for one in recent if one.number == last.number), None)
        return begun, last.record.label if begun is not None else ""

    def in_flight(self) -> tuple[InFlight, ...]:
        """Return the oldest collective that is in flight on each group, and the oldest message each
        way with each peer. Any thread.
        """
        oldest: dict[tuple[str, str, int], InFlight] = {}
        for one in self._oldest_first():
            key = (one.group, one.name if one.name in MESSAGES else "", one.peer)
            if key not in oldest and one.is_under_way:
                gives_up = one.record.gives_up_soon()
                oldest[key] = InFlight(one.group, one.name, one.number, one.peer, gives_up)
        return tuple(oldest.values())

    def _oldest_first(self) -> list[Operation]:
        last = self.last
        return [*_copied(self.earlier), *([last] if last is not None else [])]


def _copied(records: Iterable[Any]) -> list[Any]:
    while True:
        try:
            return list(records)
        except RuntimeError:  # the main thread has begun one while they were copied
            continue


# What has to be equal on every rank of a collective: size and dtype of a tensor, and the root. Read
# off each collective as it begins, as tensors are not held for it: a third of a microsecond.


def signer(method: str) -> Callable[[Any, Any], Signature]:
    """Return the function that reads the signature off the arguments of a method of
    ``ProcessGroup``.
    """
    if method in _WITHOUT_TENSORS:
        return lambda args, kwargs: _NOTHING
    if method in _ROOTED:
        return _rooted(1 if method in _BY_INPUT else 0)
    if method.endswith("_coalesced"):
        return _coalesced
    if method == "alltoall":  # its parts may differ from pair to pair
        return lambda args, kwargs: (-1, _size(args, 0)[1], -1)
    if method == "alltoall_base":
        return _split
    place = 1 if method in _BY_INPUT else 0
    return lambda args, kwargs: _size(args, place)


def _size(args: Any, place: int) -> Signature:
    try:
        tensor = args[place]
        while type(tensor) is not Tensor and not isinstance(tensor, Tensor):
            tensor = tensor[0]
        return tensor.numel(), tensor.dtype, -1
    except (IndexError, TypeError):  # by keyword, or there is none
        return _NOTHING


def _rooted(place: int) -> Callable[[Any, Any], Signature]:
    def sign(args: Any, kwargs: Any) -> Signature:
        num_elements, dtype, _ = _size(args, place)
        root = getattr(args[-1] if args else kwargs.get("opts"), "rootRank", -1)
        return num_elements, dtype, root

    return sign


def _coalesced(args: Any, kwargs: Any) -> Signature:
    num_elements, dtype, _ = _size(args, 0)
    try:
        tensors = args[0]
        return sum(each.numel() for each in tensors), dtype, -1
    except (AttributeError, IndexError, TypeError):  # lists of lists
        return (-1, dtype, -1) if num_elements >= 0 else _NOTHING


def _split(args: Any, kwargs: Any) -> Signature:
    num_elements, dtype, _ = _size(args, 0)
    is_even = len(args) > 3 and not args[2] and not args[3]
    return num_elements if is_even else -1, dtype, -1


def compare_first(store: Store, key: str, mine: Begun, place: str) -> None:
    """Compare a collective that this rank is about to begin with that of the first member who has
    got there; raise RuntimeError if they cannot meet, as gloo would end the process.

    Args:
        store: which all members use; if it cannot be reached, nothing is compared.
        key: of this collective in the store, the same on all members.
        mine: the collective.
        place: names the group, as ``on dp``.
    """
    text = f"{mine.name}{_amount(mine)}"
    try:
        theirs = bytes(store.compare_set(key, "", text)).decode()
    except Exception:
        return
    if theirs != text:
        raise RuntimeError(
            f"{place} the next operation is {text} on this rank and {theirs} on another: these "
            "cannot meet, so this rank has not begun it (after a stop or a failure, ranks may have "
            "gone on from different places)"
        )


def _amount(begun: Begun) -> str:
    size = "" if begun.num_elements < 0 else f"{begun.num_elements:,} "
    root = f" with rank {begun.root} as its root" if begun.root >= 0 else ""
    return f" of {size}{begun.dtype}{root}" if begun.dtype else root


def as_begun(
    number: int, name: str, num_elements: int, dtype: Any, root: int, ranks: tuple[int, ...] = ()
) -> Begun:
    """Return the description of a collective that other processes get.

    Args:
        number, name, num_elements, dtype, root: as in `Signed`.
        ranks: the group's members, () for all.
    """
    root = ranks[root] if ranks and 0 <= root < len(ranks) else root
    dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
    return Begun(number, name, num_elements, dtype, root)
