"""A set of ranks of a mesh, to which features send work, and the pickling of calls and values for
them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeshUsageError
from ..wire.codec import Frame
from ..wire.limits import SEGMENT_BYTES
from ..wire.messages import Channel, FeatureRequest, Pickled, Request, Signal, Work
from ..wire.modules import loaded
from ..wire.segments import MIN_BYTES, SegmentFrame, num_bytes_of
from ..wire.verbs import RunCall, RunScript
from .core.requests import control
from .output.calling_cell import current_sink
from .output.console import Sink, Unremarked
from .output.fold import HOLD_HOSTS_S, HOLD_S
from .output.printer import Printer
from .run import Run, WorkItem

if TYPE_CHECKING:
    from ..wire.payload import Reducer
    from .session.session import Session


class RankSet:
    """A set of ranks of a mesh, to which features send work.

    Args:
        session: session of the mesh.
        ranks: numbers of the ranks.
        is_single: whether a run's result is the value of the only rank, not `Results`.
    """

    def __init__(self, session: Session, ranks: Sequence[int], is_single: bool = False) -> None:
        self.session = session
        self.ranks = tuple(ranks)
        self.is_single = is_single

    def __len__(self) -> int:
        return len(self.ranks)

    def part(self, ranks: Sequence[int], is_single: bool = False) -> RankSet:
        """Return a set of other ranks of the same mesh."""
        return RankSet(self.session, ranks, is_single)

    def living(self) -> list[int]:
        """Return the ranks that are not dead, and that a resize has left."""
        dead, num_ranks = self.session.dead_ranks, self.session.num_ranks
        return [rank for rank in self.ranks if rank < num_ranks and rank not in dead]

    def start(
        self,
        work: Work | FeatureRequest,
        title: str = "the call",
        buffers: Sequence[Frame] = (),
        *,
        num_bytes: int = 0,
        channel: Channel = "work",
        sink: Sink | None = None,
        printer: Printer | None = None,
    ) -> Run[Any]:
        """Send work to the ranks as a run, without waiting for its end; wait only while too much
        work is queued for the ranks.

        Args:
            work: message with the work of each rank; its `run`, if it has one, is set here.
            title: name of the run in errors.
            buffers: frames that the payload of the work announces.
            num_bytes: size of the arguments, in bytes.
            channel: ``control`` for work of a rank's control thread, beside the run that the rank
                executes.
            sink: shows the output; None for the calling notebook cell or the console.
            printer: shows the output in place of a printer with the sink.

        Raises:
            NoMeshError: the mesh has ended.
            RankDied: one of the ranks is dead.
        """
        session = self.session
        verb: Work = Request(0, work) if isinstance(work, FeatureRequest) else work  # type: ignore[arg-type]
        kind = type(work)
        item = WorkItem(
            verb,
            kind,
            self.ranks,
            buffers,
            title,
            channel,
            num_bytes,
            self.is_single,
            verb.interleaves,
        )
        if printer is None:
            sink = sink or current_sink(session.displays)
            # The caller of a query reports its failures, so remarks would repeat them.
            sink = Unremarked(sink) if kind.is_query else sink
            hold_s = HOLD_HOSTS_S if session.has_hosts else HOLD_S
            folds_numbers = session.displays.folds_numbers
            heading = session.displays.heading
            printer = Printer(
                self.ranks, sink, kind.is_user_code, hold_s, folds_numbers, heading=heading
            )
        run = session.runs.start_run(item, printer)
        if buffers and isinstance(buffers[0], SegmentFrame):
            run.on_end([*buffers].clear)  # the segment is not reused before
        return run

    def lend(
        self, pickled: Pickled, buffers: Sequence[Frame]
    ) -> tuple[Pickled, Sequence[Frame], int]:
        """Wait until the ranks' queues have room for a call's arguments, and write large arguments
        into a shared-memory segment.

        Returns:
            The pickle and the buffers to send, and their size in bytes for the queue's limit.
        """
        num_bytes = len(pickled.stream)
        if not buffers and num_bytes < MIN_BYTES:
            return pickled, buffers, num_bytes
        num_bytes = num_bytes_of(pickled, buffers)
        if num_bytes >= MIN_BYTES:
            num_bytes = max(num_bytes, SEGMENT_BYTES)
            self.session.runs.make_room(self.ranks, num_bytes)
        return *self.session.segments.lend_pickle(pickled, buffers), num_bytes


def pack_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    interleaves: bool = False,
) -> RunCall | None:
    """Return the message for a call of a function that needs nothing but its code, with numbers and
    short texts; None for other calls, which need `dump_call`.
    """
    from ..wire.payload import is_short  # not for cells
    from ..wire.plain_functions import pack

    for value in (*args, *kwargs, *kwargs.values()):
        if not is_short(value):
            return None
    packed = pack(function)
    if not packed:
        return None
    return RunCall(0, Pickled(pickle.dumps((args, kwargs), 5)), packed, interleaves)


def dump_call(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Frame]]:
    """Pickle a function (or the target of an operation on an actor) and its arguments, for ranks to
    call.

    Raises:
        UnpicklableError: one of them cannot be pickled; the message names it.
    """
    from ..wire.payload import dumps

    try:
        return dumps((function, args, kwargs), name, loaded.reducer())
    except MeshUsageError:
        for part in function if isinstance(function, tuple) else (function,):
            dumps(part, getattr(part, "__qualname__", name), loaded.reducer())  # to name the part
        for position, value in enumerate(args):
            dumps(value, f"argument {position} of {name}", loaded.reducer())
        for key, value in kwargs.items():
            dumps(value, f"argument {key} of {name}", loaded.reducer())
        raise


def dump_names(names: Mapping[str, Any], reducer: Reducer | None = None) -> tuple[Any, list[Frame]]:
    """Pickle values with their names, for ranks to assign to variables.

    Args:
        names: name -> value.
        reducer: reduces objects for pickle, see `payload.dumps`; None for the reducer of functions
            in the notebook's modules.

    Raises:
        UnpicklableError: a value cannot be pickled; the message names it.
    """
    from ..wire.payload import dumps

    reducer = reducer or loaded.reducer()
    try:
        return dumps(dict(names), "push", reducer)
    except MeshUsageError:
        for name, value in names.items():  # to name the value in the error
            dumps(value, name, reducer)
        raise


def submit_script(
    rank_set: RankSet,
    path: str,
    argv: Sequence[str] = (),
    *,
    is_module: bool = False,
    is_shared: bool = False,
    keeps: bool = False,
    is_terminal: bool = False,
    is_joined: bool = False,
    printer: Printer | None = None,
) -> Run[Any]:
    """Run a script on ranks as their ``__main__``, without waiting for its end.

    Args:
        rank_set: the ranks.
        path: path of the script, or name of the module, as in `RunScript`.
        argv: arguments of the script.
        is_module, is_shared, keeps, is_terminal, is_joined: as in `RunScript`.
        printer: shows the output; None for the calling notebook cell or the console.

    Raises:
        NoMeshError: the mesh has ended.
        RankDied: one of the ranks is dead.
    """
    place = Path("." if is_module else path).resolve()
    copies = [
        str(Path(str(index), place.relative_to(root)))
        for index, root in enumerate(rank_set.session.ticket.roots)
        if place.is_relative_to(root)
    ]
    flags = (is_module, is_shared, keeps, is_terminal, is_joined)
    work = RunScript(0, path, tuple(argv), *flags, *copies[:1])
    return rank_set.start(work, path if is_module else Path(path).name, printer=printer)


def signal_ranks(rank_set: RankSet, number: int) -> None:
    """Send a signal to the processes of ranks, whose handlers handle it."""
    verb, ranks = Signal(number), rank_set.living()
    rank_set.session.runs.post_if_open(lambda core, now: [control(ranks, verb)])
