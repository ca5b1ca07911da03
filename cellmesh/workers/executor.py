"""Runs work on the rank's main thread and answers it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import CellmeshError, GroupDown, Released, UnpicklableError
from ..wire import payload
from ..wire.framing import Frame, Parcel
from ..wire.messages import (
    BeginProfile,
    Check,
    Checkpoint,
    Compare,
    Done,
    EndProfile,
    Failed,
    FromFrontEnd,
    GatherNames,
    GatherTensor,
    Heal,
    Look,
    PostMortem,
    PullNames,
    PushNames,
    RunCall,
    RunCell,
    SetMesh,
    SurveyNames,
    Sync,
    Timing,
    Work,
)
from .activity import Stop, Waited, describe_interruption
from .borrowing import bind_missing_names
from .comms.hub import Comms
from .debugger import post_mortem, remember_error
from .groups import leftovers
from .groups.groups import Groups
from .groups.stopping import lost_its_peers
from .inspection import is_dtensor
from .interrupts import Interrupts
from .looking.answering import Looker
from .metering import MemoryMeter
from .processes import flush_c_stdio
from .replicas.checking import interrupted_step
from .shell import RankShell
from .spans import name_of
from .streams import Pump, RunTracker

if TYPE_CHECKING:
    from .checkpoint.saving import Checkpoints
    from .profiling import CellProfiler

_MAX_TEXT = 10_000


class Executor:
    """Executes work, one piece after another.

    Args:
        shell: runs cells; its namespace is the rank's.
        groups: the rank's process groups.
        pump: takes answers, after all output.
        tracker: told which run executes.
        interrupts: told which run may be interrupted.
        stop_of: how a run was interrupted or released, None if it was not.
        meter: told of cells.
        looker: answers what the notebook wants to look at.
        comms: the widgets that user code has made.
        needs_groups: the rank replaces one that died, and has no process groups before the first `Heal`.
        on_end: told of a run's end, before the answer, and what it ended with.
    """

    def __init__(
        self,
        shell: RankShell,
        groups: Groups,
        pump: Pump,
        tracker: RunTracker,
        interrupts: Interrupts,
        stop_of: Callable[[int], Stop | None],
        meter: MemoryMeter,
        looker: Looker,
        comms: Comms,
        needs_groups: bool,
        on_end: Callable[[int, BaseException | None], None] = lambda run, error: None,
    ) -> None:
        self._shell = shell
        self._groups = groups
        self._pump = pump
        self._tracker = tracker
        self._interrupts = interrupts
        self._stop_of = stop_of
        self._meter = meter
        self._looker = looker
        self._comms = comms
        self._needs_groups = needs_groups
        self._on_end = on_end
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
        self._tracker.enter(work.run)
        self._groups.mark()
        outcome: Parcel[Done] | BaseException
        try:
            try:
                self._interrupts.begin(work.run)
                outcome = self._perform(work, buffers)
            finally:
                self._interrupts.end()
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the rank stays
            outcome = error
            if type(work) is RunCall:
                remember_error(error)
        if isinstance(outcome, BaseException):
            seen = self._as_seen(work.run, outcome)
            self._on_end(work.run, seen)
            answer: Parcel[Any] = self._safe_failure(work.run, seen)
            if leftovers.is_dirty():
                self._groups.mark_broken()
        else:
            self._on_end(work.run, None)
            answer = self._with_counts(outcome)
        if self._timing is not None:
            answer = Parcel(msgspec.structs.replace(answer.verb, timing=self._timing), answer.buffers)
        if type(work) is RunCell:
            flush_c_stdio()
        self._tracker.enter(-1)
        self._pump.send(answer, ends_run=True, more_follows=more_follows)
        return type(answer.verb) is Done

    def _with_counts(self, answer: Parcel[Done]) -> Parcel[Done]:
        """Tell on which groups the run has begun collectives."""
        counts = self._groups.counts_since_mark()
        if not counts:
            return answer
        return Parcel(msgspec.structs.replace(answer.verb, counts=counts), answer.buffers)

    def _perform(self, work: Work, buffers: tuple[Frame, ...]) -> Parcel[Done] | BaseException:
        match work:
            case RunCall():
                self._comms.begin_run(work.run, work.lead, work.audience)
                function, args, kwargs = payload.loads(work.payload, buffers)
                bind_missing_names((function, args, kwargs), self._shell.user_ns)
                self._looker.spans.begin_cell(work.run, name_of(function), 0)
                try:
                    result = function(*args, **kwargs)
                finally:
                    self._looker.spans.end_cell()
                return self._value(work.run, result, "the result")
            case RunCell():
                self._comms.begin_run(work.run, work.lead, work.audience)
                error = self._run_timed(work) if work.is_timed else self._run_cell(work)
                return Parcel(Done(work.run)) if error is None else error
            case PushNames():
                names = payload.loads(work.payload, buffers)
                self._shell.user_ns.update(names)
                bind_missing_names(names, self._shell.user_ns)
                return Parcel(Done(work.run))
            case PullNames():
                return self._value(work.run, self._evaluate(work.expression), work.expression)
            case SetMesh():
                mesh = self._groups.build_mesh(work.mesh_dim_names, work.mesh_shape)
                self._shell.user_ns["mesh"] = mesh
                return Parcel(Done(work.run))
            case Heal():
                self._heal(work)
                return Parcel(Done(work.run))
            case Check() | Compare() | GatherTensor() | Sync() | SurveyNames() | GatherNames():
                return self._look_after_replicas(work, buffers)
            case Checkpoint():
                return self._value(work.run, self._keep(work), work.path)
            case PostMortem():
                post_mortem()
                return Parcel(Done(work.run))
            case BeginProfile() | EndProfile():
                return self._profile(work)
            case Look():
                return self._value(work.run, self._looker.answer(work.subject, False), "the answer")
            case FromFrontEnd():
                self._comms.receive(work, buffers)
                return Parcel(Done(work.run))
        raise AssertionError(work)

    def _run_timed(self, work: RunCell) -> BaseException | None:
        from .timing import Stopwatch  # rarely used

        stopwatch = Stopwatch(self._groups)
        stopwatch.start()
        try:
            return self._run_cell(work)
        finally:
            self._timing = stopwatch.stop()

    def _run_cell(self, work: RunCell) -> BaseException | None:
        self._meter.begin(work.execution_count)
        self._looker.spans.begin_cell(work.run, "", work.execution_count)
        try:
            if self._profiler is not None:
                self._profiler.start()
            return self._shell.run_source(
                work.source, work.transformed, work.is_async, work.execution_count, work.quiet
            )
        finally:
            if self._profiler is not None:
                self._profiler.stop()
            self._looker.spans.end_cell()
            self._meter.end()

    def _profile(self, work: BeginProfile | EndProfile) -> Parcel[Done]:
        from . import profiling  # rarely used

        profiler, self._profiler = self._profiler, None
        if isinstance(work, BeginProfile):
            self._profiler = profiling.CellProfiler(self._groups, self._groups.placement.device)
            return Parcel(Done(work.run))
        found = None if profiler is None else profiler.collect(work.trace_path, work.max_trace_bytes)
        return self._value(work.run, found, "the profile")

    def _heal(self, work: Heal) -> None:
        if self._needs_groups:
            self._needs_groups = False
            self._shell.user_ns["mesh"] = self._groups.rejoin(
                work.blueprint, work.mesh_dim_names, work.mesh_shape
            )
        self._groups.heal(work.generation, frozenset(work.ranks), work.store_port or None)

    def _look_after_replicas(self, work: Any, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        from .replicas import checking as replicas
        from .replicas import copying, syncing  # rarely used

        namespace = self._shell.user_ns
        match work:
            case Check():
                return self._value(work.run, replicas.check(namespace, work.expression), "the digests")
            case Compare():
                theirs = payload.loads(work.payload, buffers)
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
            from .checkpoint.saving import Checkpoints  # rarely used

            self._checkpoints = Checkpoints(self._shell.user_ns)
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
        return Parcel(Done(run, pickled), tuple(buffers))

    def _safe_failure(self, run: int, error: BaseException) -> Parcel[Failed]:
        """As `_failure`, whatever the exception's own code does when it is looked at."""
        try:
            return self._failure(run, error)
        except Exception as why:
            kind = type(error).__name__
            text = f"(not shown: {type(why).__name__}: {why})"
            return Parcel(Failed(run, kind, text, f"{kind} {text}", 0))

    def _as_seen(self, run: int, error: BaseException) -> BaseException:
        """The error as its user should see it: interrupts, and connections that were cut, as such."""
        seen = _as_interrupt(error)
        stop = self._stop_of(run)  # None: others may have cut the connections before this rank was told
        was_cut = lost_its_peers(error) or (
            stop is not None and isinstance(error, GroupDown | dist.DistError)
        )
        if isinstance(seen, KeyboardInterrupt) or not was_cut or not self._groups.is_broken:
            return seen
        stopped = (Released if stop is None else stop.kind)().with_traceback(error.__traceback__)
        stopped.__cause__ = error
        return stopped

    def _failure(self, run: int, error: BaseException) -> Parcel[Failed]:
        text = _text_of(error)
        line = self._shell.line_in_cell(error.__traceback__)
        if isinstance(error, Released):
            return self._release(run, error, line)
        if isinstance(error, KeyboardInterrupt):
            text = text or describe_interruption(error.__traceback__, error.__context__)
            text += _describe_handled(error)
            traceback = f"{type(error).__name__}: {text}" + (f" at line {line}" if line else "")
        elif isinstance(error, CellmeshError):
            traceback = f"{type(error).__name__}: {text}"
        else:
            traceback = self._shell.render_traceback(error)
            if len(traceback) > 4 * _MAX_TEXT:
                traceback = f"{traceback[: 2 * _MAX_TEXT]}\n…\n{traceback[-2 * _MAX_TEXT :]}"
        kind = type(error).__name__
        verb = Failed(run, kind, text, traceback, line, in_step=interrupted_step(error.__traceback__))
        try:
            pickled, buffers = payload.dumps(error, f"the {kind}", reduce_for_notebook)
        except UnpicklableError as why:
            return Parcel(msgspec.structs.replace(verb, why_no_payload=str(why)))
        return Parcel(msgspec.structs.replace(verb, payload=pickled), tuple(buffers))

    def _release(self, run: int, error: Released, line: int) -> Parcel[Failed]:
        """What is told of a rank that was freed, as others would not come."""
        stop = self._stop_of(run)
        waited = stop.waited if stop is not None else Waited()
        operation = self._groups.last_operation()
        if error.__cause__ is not None and operation is not None and not waited.collective:
            waited = Waited(operation.name, operation.group, time.monotonic() - operation.since)
        text = (
            f"waited in {waited.collective}"
            if waited.collective
            else describe_interruption(error.__traceback__, error.__context__).replace(
                "interrupted in", "ran"
            )
        )
        text += _describe_handled(error)
        traceback = f"Released: {text}" + (f" at line {line}" if line else "")
        pickled, buffers = payload.dumps(Released(text), "Released")
        verb = Failed(
            run,
            "Released",
            text,
            traceback,
            line,
            pickled,
            "",
            True,
            waited.collective,
            waited.waited_s,
            interrupted_step(error.__traceback__),
        )
        return Parcel(verb, tuple(buffers))


def _as_interrupt(error: BaseException) -> BaseException:
    """The KeyboardInterrupt that an error came from, where library code met it unprepared."""
    cause: BaseException | None = error
    seen: set[int] = set()  # user code can make a circle of causes
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, KeyboardInterrupt):
            return cause
        seen.add(id(cause))
        cause = cause.__context__ if cause.__cause__ is None else cause.__cause__
    return error


def _describe_handled(error: BaseException) -> str:
    """The error of the user's own code that was being handled when this one struck, as in a ``finally``."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, Exception) and not lost_its_peers(cause):
            return f", while handling {type(cause).__name__}: {_text_of(cause)}"
        seen.add(id(cause))
        cause = cause.__context__ if cause.__cause__ is None else cause.__cause__
    return ""


def _text_of(error: BaseException) -> str:
    try:
        text = str.__str__(str(error))  # a subclass of str would not be encoded
    except Exception as e:
        return f"<its str() raised {type(e).__name__}>"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"


def reduce_for_notebook(value: Any) -> Any:
    """How tensors travel to a process without GPUs and process groups (see `payload.dumps`)."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            raise UnpicklableError(
                "a DTensor cannot leave its process group: pull `.to_local()` (each rank's part) or "
                "`.full_tensor()` (the whole) of it"
            )
        if value.device.type not in ("cpu", "meta"):
            return value.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return NotImplemented
