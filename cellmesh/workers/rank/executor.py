"""Runs work on the rank's main thread and answers it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from ...stdlib import time
from ...wire import payload
from ...wire.codec import Frame, Parcel, make_parcel
from ...wire.inspect import Refusal
from ...wire.messages import (
    BeginProfile,
    Check,
    Checkpoint,
    Compare,
    Done,
    EndProfile,
    FromFrontEnd,
    GatherNames,
    GatherParts,
    GatherTensor,
    Heal,
    Look,
    PostMortem,
    PullNames,
    PushNames,
    PushParts,
    RunCall,
    RunCell,
    SetMesh,
    SurveyNames,
    Sync,
    Timing,
    Work,
    interrupted_unbegun,
)
from ...wire.segments import MIN_BYTES
from ..groups import model_reset
from ..groups.groups import Groups
from ..linux_process import PROGRAM, flush_c_stdio
from ..trace.recorder import name_of
from .child_processes import end_children
from .failures import Failures
from .features import load
from .interpreter_state import remember_error
from .interrupts import Interrupts
from .late_binding import bind_missing_names
from .memory import MemoryMeter
from .runs import RunRecord, RunTracker
from .segment_link import SegmentLink
from .shell import RankShell
from .streams import Pump
from .value_reducer import reduce_for_notebook

if TYPE_CHECKING:
    from ..checkpoint.saving import Checkpoints
    from ..comms.hub import Comms
    from ..inspect.handler import Looker
    from ..trace.timing import Stopwatch
    from ..trace.torch_profiler import CellProfiler


# What Python begins with; user code may set one that neither a heal nor a description gets along
# with.
_MIN_RECURSION = 1000
# With less, no cell can begin.
_TOO_LITTLE_RECURSION = 200


def _allow_recursion() -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _MIN_RECURSION))


async def _await(value: Any) -> Any:
    return await value


class Bars(Protocol):
    """What shows progress; see `bars.meters.Meters`."""

    has_news: bool

    def end_run(self, run: int, error: BaseException | None) -> None:
        """The main thread has ended a run with this, and its answer is about to be sent."""


class _NoBars:
    """Where there are no progress bars."""

    has_news = False

    def end_run(self, run: int, error: BaseException | None) -> None:
        """Nothing is to be done."""


class _EndsAsChild:
    def __init__(self, end: Callable[[BaseException | None], NoReturn]) -> None:
        self.has_news, self._end = True, end

    def end_run(self, run: int, error: BaseException | None) -> None:
        self._end(error)


class Executor:
    """Executes work, one piece after another.

    Args:
        shell: runs cells; its namespace is the rank's.
        groups: the rank's process groups.
        pump: takes answers, after all output.
        tracker: has the record of the run that executes.
        interrupts: told which run may be interrupted.
        failures: tells of runs that failed.
        meter: told of cells.
        looker: gives what answers the notebook's looks.
        comms: the widgets that user code has made; None where there can be none.
        segments: takes large values in and gives them out.
        needs_groups: the rank replaces one that died, and has no process groups before the first
            `Heal`.
        bars: the progress bars of user code.
    """

    def __init__(
        self,
        shell: RankShell,
        groups: Groups,
        pump: Pump,
        tracker: RunTracker,
        interrupts: Interrupts,
        failures: Failures,
        meter: MemoryMeter,
        looker: Callable[[], Looker],
        comms: Comms | None,
        segments: SegmentLink,
        needs_groups: bool,
        bars: Bars | None = None,
    ) -> None:
        self._shell = shell
        self._namespace: dict[str, Any] = shell.user_ns
        self._groups = groups
        self._ledger = groups.ledger
        self._pump = pump
        self._tracker = tracker
        self._interrupts = interrupts
        self._failures = failures
        self._meter = meter
        self._looker = looker
        self._comms = comms
        self._segments = segments
        self._needs_groups = needs_groups
        self._bars = bars if bars is not None else _NoBars()
        self._checkpoints: Checkpoints | None = None
        self._profiler: CellProfiler | None = None
        self._timing: Timing | None = None

    def execute(self, parcel: Parcel[Any], more_follows: bool) -> bool:
        """Run one piece of work and send its answer, whatever happens in it.

        Args:
            parcel: the work.
            more_follows: another piece waits behind it.

        Returns:
            Whether it ended well.
        """
        work, buffers = parcel
        self._timing = None
        if sys.getrecursionlimit() < _TOO_LITTLE_RECURSION:
            _allow_recursion()
        self._tracker.enter(work.run)
        if self._ledger.touched:
            self._groups.mark()
        outcome: Parcel[Done] | BaseException | None
        try:
            try:
                self._interrupts.begin(work.run)
                outcome = self._perform(work, buffers)
            finally:
                self._interrupts.running = -1  # nothing is left to be interrupted from here on
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the rank stays
            outcome = error
        if isinstance(outcome, BaseException):
            answer: Parcel[Any] = self._describe_failure(work, outcome)
        else:
            if self._bars.has_news:
                self._bars.end_run(work.run, None)
            answer = outcome if outcome is not None else make_parcel((Done(work.run), ()))
            if self._ledger.touched:
                counts = self._groups.counts_since_mark()
                answer = Parcel(msgspec.structs.replace(answer.verb, counts=counts), answer.buffers)
        if self._timing is not None:
            answer = Parcel(
                msgspec.structs.replace(answer.verb, timing=self._timing), answer.buffers
            )
        if type(work) is RunCell:
            flush_c_stdio()
        self._tracker.main_run = -1
        self._pump.answer(answer, more_follows)
        return type(answer.verb) is Done

    def _describe_failure(self, work: Work, error: BaseException) -> Parcel[Any]:
        try:
            _allow_recursion()
            self._interrupts.describe(work.run)
            if type(work) is RunCall:
                remember_error(error)
            error = self._failures.as_seen(work.run, error)
            self._bars.end_run(work.run, error)
            if issubclass(type(error), KeyboardInterrupt):
                end_children(work.run)
            answer = self._failures.describe(work.run, error)
            self._look_after_failure()
        finally:
            self._interrupts.end()
        return answer

    def rescue(self, run: int, error: BaseException, more_follows: bool) -> bool:
        """Answer a run of which an exception has left `execute`.

        User code can have any line of ours raise: by a profile function, a recursion limit that is
        too low, a signal's handler, an exception for this thread. The first two are taken back.
        """
        sys.setprofile(None)
        sys.settrace(None)
        _allow_recursion()
        self._interrupts.describe(run)
        self._bars.end_run(run, error)
        self._groups.mark_broken()
        answer = self._failures.describe(run, error)
        self._interrupts.end()
        self._tracker.main_run = -1
        if self._pump.has_answered(run):
            self._pump.flush()
        else:
            self._pump.answer(answer, more_follows)
        return False

    def pass_over(self, run: int, more_follows: bool) -> bool:
        """Answer a run at once that was interrupted before it began, as thousands may be; whether
        it was.
        """
        if not self._interrupts.takes_back(run):
            return False
        self._pump.answer(Parcel(interrupted_unbegun(run)), more_follows)
        return True

    def end_as_child(self, end: Callable[[BaseException | None], NoReturn]) -> None:
        """This process was forked from the rank's: what it executes is its last."""
        self._bars = _EndsAsChild(end)
        for callbacks in self._shell.events.callbacks.values():
            callbacks.clear()  # what they show and send is the rank's

    def _perform(
        self, work: Work, buffers: tuple[Frame, ...]
    ) -> Parcel[Done] | BaseException | None:
        """Do it; the answer, an error that was caught, or None for the plain `Done`."""
        match work:
            case RunCall():
                function, args, kwargs = payload.loads(work.payload, buffers, self._segments)
                bind_missing_names((function, args, kwargs), self._namespace)
                record = RunRecord(
                    work.run, name_of(function), 0, work.lead, work.audience, time.monotonic()
                )
                self._tracker.records.append(record)
                try:
                    result = function(*args, **kwargs)
                    if hasattr(type(result), "__await__"):
                        result = self._shell.loop_runner(_await(result))
                finally:
                    record.end_s = time.monotonic()
                return None if result is None else self._value(work.run, result, "the result")
            case RunCell():
                return self._run_timed(work) if work.is_timed else self._run_cell(work)
            case PushNames():
                names = payload.loads(work.payload, buffers, self._segments)
                self._shell.user_ns.update(names)
                bind_missing_names(names, self._shell.user_ns)
                return Parcel(Done(work.run))
            case PushParts():
                names = payload.loads(work.payload, buffers, self._segments)
                parts = load("values.shards").own_parts(names, work, self._groups)
                self._shell.user_ns.update(parts)
                return Parcel(Done(work.run))
            case GatherParts():
                part = load("values.shards").give_part(self._evaluate(work.expression))
                return self._value(work.run, part, work.expression)
            case PullNames():
                return self._value(work.run, self._evaluate(work.expression), work.expression)
            case SetMesh():
                mesh = self._groups.build_mesh(work.mesh_dim_names, work.mesh_shape)
                self._shell.user_ns["mesh"] = mesh
                return Parcel(Done(work.run))
            case Heal():
                return Parcel(Done(work.run, notes=self._heal(work)))
            case Check() | Compare() | GatherTensor() | Sync() | SurveyNames() | GatherNames():
                return self._look_after_replicas(work, buffers)
            case Checkpoint():
                return self._value(work.run, self._keep(work), work.path)
            case PostMortem():
                load("rank.debugger").post_mortem()
                return Parcel(Done(work.run))
            case BeginProfile() | EndProfile():
                return self._profile(work)
            case Look():
                return self._look(work)
            case FromFrontEnd():
                (self._comms or load("comms.hub").Comms).receive(work, buffers)
                return Parcel(Done(work.run))
        raise AssertionError(work)

    def _look(self, work: Look) -> Parcel[Done]:
        answer = self._looker().answer(work.subject, False)
        # An expression that was run may have stopped inside a collective, or in the middle of a
        # step.
        if isinstance(answer, Refusal) and getattr(work.subject, "runs", False):
            self._look_after_failure()
        return self._value(work.run, answer, "the answer")

    def _look_after_failure(self) -> None:
        try:
            is_dirty = model_reset.look_after_failure()
        except BaseException:  # an interrupt, since code of a model's does not end
            is_dirty = True
        if is_dirty:
            self._groups.mark_broken()

    def _run_timed(self, work: RunCell) -> BaseException | None:
        stopwatch: Stopwatch = load("trace.timing").Stopwatch(self._groups)
        stopwatch.start()
        try:
            return self._run_cell(work)
        finally:
            self._timing = stopwatch.stop()

    def _run_cell(self, work: RunCell) -> BaseException | None:
        self._meter.begin(work.execution_count)
        record = RunRecord(
            work.run, "", work.execution_count, work.lead, work.audience, time.monotonic()
        )
        self._tracker.records.append(record)
        if work.argv is not None:
            before, sys.argv = getattr(sys, "argv", [PROGRAM]), [PROGRAM, *work.argv]
        try:
            if self._profiler is not None:
                self._profiler.start()
            error = self._shell.run_source(
                work.source, work.transformed, work.is_async, work.execution_count, work.quiet
            )
            if type(error) is SystemExit and error.args == (
                2,
            ):  # argparse's, click's: wrong arguments
                error.add_note('`%%dist --argv "--lr 0.1"` gives a cell arguments')
            return error
        finally:
            if self._profiler is not None:
                self._profiler.stop()
            if work.argv is not None:
                sys.argv = before
            record.end_s = time.monotonic()
            self._meter.end()

    def _profile(self, work: BeginProfile | EndProfile) -> Parcel[Done]:
        profiling = load("trace.torch_profiler")
        profiler, self._profiler = self._profiler, None
        if isinstance(work, BeginProfile):
            self._profiler = profiling.CellProfiler(self._groups, self._groups.placement.device)
            return Parcel(Done(work.run))
        found = (
            None if profiler is None else profiler.collect(work.trace_path, work.max_trace_bytes)
        )
        return self._value(work.run, found, "the profile")

    def _heal(self, work: Heal) -> tuple[str, ...]:
        if self._needs_groups:
            self._needs_groups = False
            self._shell.user_ns["mesh"] = self._groups.rejoin(
                work.blueprint, work.mesh_dim_names, work.mesh_shape
            )
        return self._groups.heal(work.generation, frozenset(work.ranks), work.store_port or None)

    def _look_after_replicas(self, work: Any, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        replicas, copying, syncing = (
            load(f"replicas.{name}") for name in ("checking", "copying", "syncing")
        )
        namespace = self._shell.user_ns
        match work:
            case Check():
                return self._value(
                    work.run, replicas.check(namespace, work.expression), "the digests"
                )
            case Compare():
                theirs = payload.loads(work.payload, buffers, self._segments)
                found = replicas.compare(namespace, work.expression, work.path, theirs)
                return self._value(work.run, found, work.path)
            case GatherTensor():
                return self._value(
                    work.run, replicas.find_tensor(namespace, work.expression, work.path), work.path
                )
            case Sync():
                report = syncing.sync(namespace, work.expression, work.source)
                return self._value(work.run, report, "the report")
            case SurveyNames():
                return self._value(work.run, copying.survey(namespace), "the names")
            case GatherNames():
                pickled, out_of_band = copying.gather(namespace, work.names)
                return Parcel(Done(work.run, pickled), tuple(out_of_band))
        raise AssertionError(work)

    def _keep(self, work: Checkpoint) -> Any:
        if self._checkpoints is None:
            self._checkpoints = load("checkpoint.saving").Checkpoints(self._shell.user_ns)
        match work.action:
            case "check_save":
                return self._checkpoints.check_save(work.names, work.path)
            case "save":
                return self._checkpoints.save(work.names, work.path, work.waits)
            case "check_load":
                return self._checkpoints.check_load(work.names, work.path)
            case "load":
                return self._checkpoints.load(work.names, work.path)
            case "finish":
                return self._checkpoints.finish()

    def _evaluate(self, expression: str) -> Any:
        return eval(compile(expression.strip(), "<expression>", "eval"), self._shell.user_ns)

    def _value(self, run: int, value: Any, name: str) -> Parcel[Done]:
        if value is None:
            return Parcel(Done(run))
        pickled, buffers = payload.dumps(value, name, reduce_for_notebook)
        if buffers or len(pickled.stream) >= MIN_BYTES:
            pickled, buffers = self._segments.give(run, pickled, buffers)
        return Parcel(Done(run, pickled), tuple(buffers))
