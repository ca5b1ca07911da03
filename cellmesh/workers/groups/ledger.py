"""Records which operations a rank has begun on its process groups, and which have ended."""

from __future__ import annotations

import threading as plain_threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from ...stdlib import time
from ...wire.groups import Begun, GroupCount, InFlight, label_of
from ...wire.trace import What
from ..trace.recorder import Spans, copied
from .connections import KeptConnections
from .gate import Gate
from .waits import Waits

# Number of earlier operations in flight that are recorded.
_MAX_EARLIER = 1024
# Interval at which operations in flight are polled.
_LOOK_S = 0.002
MESSAGES = frozenset({"send", "recv", "recv_anysource"})
# Number of recent collectives recorded for a group: ranks that diverged may be several apart.
NUM_RECENT = 8

Signature = tuple[int, Any, int]  # number of elements, dtype, and root's number in the group
Signed = tuple[int, str, int, Any, int]  # the collective's number and name, then its signature
_NOTHING: Signature = (-1, None, -1)
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# Collectives whose outputs may differ in size between ranks, but whose inputs do not.
_BY_INPUT = frozenset({"gather", "reduce_scatter"})
_WITHOUT_TENSORS = frozenset({"barrier", "monitored_barrier"})


class GroupRecord:
    """The operations that this rank has begun on one process group since it was made or healed.

    Args:
        name, description: torch's name and description of the group.
        ranks: ranks of its members in the mesh; () for all.
        gives_up_soon: returns whether the group's own time-out ends a wait soon.
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
        self.is_linked = False  # whether its members are of several meshes: it is not compared
        self.num_doubts = 0  # the ledger's number when a collective was last compared
        self.restart()

    def restart(self) -> None:
        """Reset all counts of operations, when the group has been connected or disconnected."""
        self.num_collectives = 0
        self.recent: deque[Signed] = deque(maxlen=NUM_RECENT)
        self.whats: dict[str, What] = {}
        self.is_touched = self.is_linked
        self.num_sent: dict[int, int] = {}
        self.num_received: dict[int, int] = {}
        self.from_anyone: list[Work] = []
        self.backward_work: Work | None = None

    @property
    def label(self) -> str:
        """The group's name for users."""
        return label_of(self.description, self.ranks)

    def global_rank(self, rank: int) -> int:
        """Return the mesh rank of the group's member with the group rank `rank`."""
        return self.ranks[rank] if self.ranks else rank

    @property
    def has_failed_in_backward(self) -> bool:
        """Whether the last collective of DDP's backward pass on this group has not succeeded, so
        that gradients are not reduced.
        """
        work = self.backward_work
        try:  # `wait` of an ended Work returns at once, or raises its error
            return work is not None and not (work.is_completed() and work.wait())
        except Exception:
            return True

    def count(self, with_messages: bool = True, with_recent: bool = False) -> GroupCount:
        """Return the number of operations begun on the group since it was made or healed."""
        if not with_messages:
            return GroupCount(self.name, self.ranks, self.num_collectives)
        self.settle_from_anyone()
        recent: list[Signed] = copied(self.recent) if with_recent else []
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
        """Count each finished receive from any source (``recv_anysource``) as one from the rank
        that sent the message.
        """
        pending, self.from_anyone = self.from_anyone, []
        for work in pending:
            if not work.is_completed():
                self.from_anyone.append(work)
            elif (source := work._source_rank()) >= 0:
                source = self.global_rank(source)
                self.num_received[source] = self.num_received.get(source, 0) + 1


class Operation:
    """A collective, send or receive that this rank has begun.

    Attributes:
        name: its name in ``torch.distributed``.
        record: record of its process group.
        since: time at which it was begun, by ``time.monotonic``.
        find_work: returns its Work, or None if the Work was freed, in which case it has ended;
            None until the call that begins it has returned.
        number: number among the group's collectives, or among the messages with its peer.
        peer: rank of a message's peer; -1 for a collective.
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
        """torch's name of the process group on which the operation was begun."""
        return self.record.name

    @property
    def is_under_way(self) -> bool:
        """Whether the operation has not ended yet."""
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
    updates the ledger, so updates must be cheap.
    """

    waits: Waits
    kept: KeptConnections = field(default_factory=KeptConnections)
    spans: Spans = field(default_factory=Spans)
    generation: int = 0  # generation of the groups; 0 until the first heal
    # Number of stops and heals so far, after which ranks may continue from different places: the
    # next collective on each group is compared, by `compare_first`.
    num_doubts: int = 0
    compare_first: Callable[[GroupRecord, Signed, int], None] = lambda record, signed, size: None
    # Called with the name of a collective before it begins; raises an error if it must not.
    may_begin: Callable[[str], None] | None = None
    # Groups on which collectives have begun since `mark`.
    touched: list[GroupRecord] = field(default_factory=list)
    last: Operation | None = None  # the main thread's, ended or not
    has_lost_peers: bool = False  # whether it has failed, and the main thread waits to be stopped
    before_run: float = 0.0  # when the last operation before the current run was begun
    # Operations that were in flight when later ones began, oldest first: the last one may fail or
    # end while an earlier one is still waited for.
    earlier: deque[Operation] = field(default_factory=lambda: deque(maxlen=_MAX_EARLIER))
    main_thread: int = field(default_factory=lambda: plain_threading.main_thread().ident or 0)
    gate: Gate = field(init=False)  # pauses the rank while its run is being stopped

    def __post_init__(self) -> None:
        self.gate = Gate(self.main_thread)

    def begin(self, operation: Operation) -> None:
        """Record an operation that the main thread begins; keep the record of the previous one if
        that is in flight.
        """
        last, self.last = self.last, operation
        if last is not None and last.is_under_way:
            self.drop_ended()
            self.earlier.append(last)

    def drop_ended(self) -> None:
        """Drop the records of the oldest operations if these have ended, as their Work objects keep
        tensors alive.
        """
        earlier = self.earlier
        while earlier and not earlier[0].is_under_way:
            earlier.popleft()

    def forget(self, record: GroupRecord) -> None:
        """Drop all records of operations on a group."""
        self.touched = [other for other in self.touched if other is not record]
        record.is_touched = False
        if self.last is not None and self.last.record is record:
            self.last = None
        kept = [one for one in self.earlier if one.record is not record]
        self.earlier = deque(kept, _MAX_EARLIER)

    def mark(self) -> None:
        """Begin a new period for which `counts_since_mark` counts collectives. Called on the main
        thread.
        """
        if self.touched:
            for record in self.touched:
                record.is_touched = False
                if not record.has_failed_in_backward:
                    record.backward_work = None  # frees its gradients
            self.touched = []
            self.drop_ended()

    def counts_since_mark(self) -> tuple[GroupCount, ...]:
        """Return the number of collectives begun on each group since the last call of `mark`.
        Called on the main thread.
        """
        return tuple([record.count(with_messages=False) for record in self.touched])

    def forget_operations(self) -> None:
        """Drop the records of all operations, as each has ended or will not be waited for."""
        self.last = None
        self.earlier.clear()

    def await_operations(self, timeout_s: float) -> None:
        """Wait until the collectives in flight have ended or failed; raise TimeoutError after
        `timeout_s` seconds. Called on the main thread.

        Messages are not waited for: gloo reports their end only after a ``wait``, and their tensors
        are used by nothing else.
        """
        deadline = time.monotonic() + timeout_s
        for operation in self._oldest_first():
            while operation.name not in MESSAGES and operation.is_under_way:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"an {operation.name} of {operation.group} did not end")
                time.sleep(_LOOK_S)

    def current(self) -> Operation | None:
        """Return the last operation begun if it is in flight, else the oldest one in flight; None
        if no operation is in flight.
        """
        last = self.last
        candidates = ([last] if last is not None else []) + copied(self.earlier)
        return next((one for one in candidates if one.is_under_way), None)

    def describe_last(self) -> str:
        """Return the last collective that this rank has begun, ended or not, with its number and
        its group's name for users; "" if a message was begun later.
        """
        last = self.last
        recent = last.record.count(with_recent=True).recent if last is not None else ()
        if last is None or last.name in MESSAGES or not recent:
            return ""
        return f"operation {last.number} on {last.record.label} ({recent[-1].describe()})"

    def in_flight(self) -> tuple[InFlight, ...]:
        """Return the oldest collective in flight on each group, and the oldest message in flight in
        each direction with each peer. Any thread may call it.
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
        return [*copied(self.earlier), *([last] if last is not None else [])]


# ---- signatures: size and dtype of a tensor, and the root, which have to be equal on all ranks of
# a collective. They are read as each collective begins (0.3 us), so that no tensors are kept for
# it.


def signer(method: str) -> Callable[[Any, Any], Signature]:
    """Return the function that computes the `Signature` (size, dtype, root) of a collective from
    the arguments of a method of ``ProcessGroup``.
    """
    if method in _WITHOUT_TENSORS:
        return lambda args, kwargs: _NOTHING
    if method in _ROOTED:
        return _rooted(1 if method in _BY_INPUT else 0)
    if method.endswith("_coalesced"):
        return _coalesced
    if method == "alltoall":  # sizes may differ for each pair of ranks
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
    except (IndexError, TypeError):  # passed by keyword, or no tensor
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
    except (AttributeError, IndexError, TypeError):  # lists of lists of tensors
        return (-1, dtype, -1) if num_elements >= 0 else _NOTHING


def _split(args: Any, kwargs: Any) -> Signature:
    num_elements, dtype, _ = _size(args, 0)
    is_even = len(args) > 3 and not args[2] and not args[3]
    return num_elements if is_even else -1, dtype, -1


def compare_first(store: Store, key: str, mine: Begun, place: str) -> None:
    """Raise RuntimeError if a collective that this rank is about to begin differs from the one that
    the first member of its group has stored; gloo would end the process.

    Args:
        store: store of all members; if it cannot be reached, nothing is compared.
        key: key of this collective in the store, the same on all members.
        mine: this rank's collective.
        place: text that names the group, as ``on dp``.
    """
    text = mine.describe()
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


def as_begun(
    number: int, name: str, num_elements: int, dtype: Any, root: int, ranks: tuple[int, ...] = ()
) -> Begun:
    """Return a collective's description in the form (`Begun`) in which it is sent to other
    processes.

    Args:
        number, name, num_elements, dtype, root: as in `Signed`.
        ranks: ranks of the group's members, () for all.
    """
    root = ranks[root] if ranks and 0 <= root < len(ranks) else root
    dtype = "" if dtype is None else str(dtype).removeprefix("torch.")
    return Begun(number, name, num_elements, dtype, root)
