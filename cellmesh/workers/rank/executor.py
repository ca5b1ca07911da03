"""Runs cells, calls and requests on the rank's main thread, and sends the answers."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ...stdlib import os, time
from ...wire import payload, plain_functions
from ...wire.codec import Frame, Parcel, make_parcel
from ...wire.groups import Heal, SetMesh
from ...wire.messages import Done, Failing, Request, Work, interrupted_unbegun
from ...wire.peer_calls import PEER_RUNS
from ...wire.segments import MIN_BYTES
from ...wire.values import GatherParts, PullNames, PushNames, PushParts
from ...wire.verbs import Imports, PostMortem, RunCall, RunCell, RunScript, Timing
from ..linux_process import PROGRAM, flush_c_stdio
from ..preload import ImportTimes
from ..run_tracker import RunRecord, RunTracker, name_of
from ..static_lookup import traceback_of
from ..trace.recorder import Stopwatch
from .child_processes import end_children, run_fork_hooks
from .failures import Failures, ScriptFailed
from .features import Packed, RankContext
from .given_names import GivenNames, resize
from .imports import load
from .memory import MemoryMeter
from .script import run_script
from .shell import remember_error
from .streams import Pump
from .tasks import Tasks, awaiting
from .value_transfer import (
    bind,
    bind_missing_names,
    give_part,
    names_of,
    own_parts,
    reduce_for_notebook,
)

if TYPE_CHECKING:
    from ..progress import TqdmBars


# Python's default; user code may set a limit that is too low for heals and descriptions of
# failures.
_MIN_RECURSION = 1000
# Below this limit, no cell can start.
_TOO_LITTLE_RECURSION = 200


def _allow_recursion() -> None:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _MIN_RECURSION))


@functools.lru_cache(256)
def _facts(packed: bytes) -> tuple[tuple[str, ...], str]:
    """Return the names that a packed function uses (`names_of`), and its own name (`name_of`)."""
    function = plain_functions.unpack(packed)
    return names_of(function.__code__), name_of(function)


@dataclass(eq=False)
class Executor:
    """Executes a rank's cells, calls and requests one after another, on the main thread."""

    _context: RankContext
    _pump: Pump  # sends answers after all output
    _tracker: RunTracker
    _failures: Failures
    _meter: MemoryMeter
    _needs_groups: bool  # whether the rank replaces a dead one: no groups before the first `Heal`
    _imports: ImportTimes
    tasks: Tasks  # of asynchronous cells and calls
    _bars: TqdmBars | None = None  # the progress bars of user code

    def __post_init__(self) -> None:
        self._shell = self._context.shell
        self._namespace: dict[str, Any] = self._context.shell.user_ns
        self._groups = self._context.groups
        self._ledger = self._context.groups.ledger
        self._interrupts = self._context.interrupts
        self._steps = self._context.steps
        self._given = GivenNames(self._namespace, self._shell.user_ns_hidden)
        self._segments = self._context.segments
        self._pid = os.getpid()
        self._end_child: Callable[[BaseException | None], NoReturn] | None = None
        # Each returns the answer, a caught error, or None for a plain `Done`.
        self._table: Mapping[type, Callable[[Any, tuple[Frame, ...]], Any]] = {
            RunCell: self._cell,
            RunCall: self._call,
            RunScript: self._script,
            PushNames: self._push,
            PushParts: self._push_parts,
            PullNames: self._pull,
            GatherParts: self._pull_part,
            SetMesh: self._set_mesh,
            Heal: self._heal,
            PostMortem: self._debug,
            Request: self._request,
        }
        self._timing: Timing | None = None
        self._notes: tuple[str, ...] = ()  # notes on names for the next heal's answer

    def execute(self, parcel: Parcel[Any], more_follows: bool) -> bool:
        """Execute a cell, call or request and send its answer; return whether it succeeded."""
        work, buffers = parcel
        self._timing = None
        if sys.getrecursionlimit() < _TOO_LITTLE_RECURSION:
            _allow_recursion()
        self._tracker.enter(work.run)
        if self._ledger.touched:
            self._groups.ledger.mark()
        self._steps.run = work.run
        if self._steps.is_used:
            self._steps.forget()
        num_doubts, last = self._ledger.num_doubts, self._ledger.last
        self._ledger.before_run = last.since if last is not None else 0.0
        outcome: Parcel[Done] | BaseException | None
        try:
            try:
                self._interrupts.begin(work.run)
                outcome = self._table[type(work)](work, buffers)
            finally:
                self._interrupts.running = -1  # from here on, no interrupt is accepted
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the rank stays
            outcome = error
        if work.interleaves and self.tasks.has_begun(work.run, outcome):
            self._tracker.main_run = -1
            return True
        if os.getpid() != self._pid and self._end_child is None:
            run_fork_hooks()
        if isinstance(outcome, BaseException):
            answer: Parcel[Any] = self._describe_failure(work, outcome)
        else:
            if self._end_child is not None or (self._bars is not None and self._bars.has_news):
                self._note_end(work.run, None)
            if self._ledger.num_doubts != num_doubts and work.is_user_code:
                self._context.look_after_failure()  # user code has caught a stop or a release
            answer = outcome if outcome is not None else make_parcel((Done(work.run), ()))
            if self._ledger.touched:
                counts = self._groups.ledger.counts_since_mark()
                answer = Parcel(msgspec.structs.replace(answer.verb, counts=counts), answer.buffers)
        if self._imports.total_s:
            self._report_imports(work.run)
        if self._timing is not None:
            answer = Parcel(
                msgspec.structs.replace(answer.verb, timing=self._timing), answer.buffers
            )
        if type(work) is RunCell:
            flush_c_stdio()
        self._tracker.main_run = -1
        self._pump.answer(answer, more_follows)
        return type(answer.verb) is Done or work.interleaves

    def _begin_waiting(self, work: RunCell | RunCall, record: RunRecord, awaited: Any) -> None:
        """Begin a cell or call that waits beside other work; its answer is sent when it ends."""

        async def answer_later(awaited: Any) -> None:
            answer = make_parcel((Done(work.run), ()))
            try:
                try:
                    value = await awaited
                    if value is not None:
                        answer = self._value(work.run, value, "the result")
                finally:
                    self._interrupts.running = -1
                self._note_end(work.run, None)
            except BaseException as error:
                answer = self._describe_failure(work, error)
            record.end_s = time.monotonic()
            self.tasks.forget(work.run)
            flush_c_stdio()
            self._pump.answer(answer)

        title = record.name or f"In[{record.execution_count}]"
        self.tasks.begin(work.run, title, awaited, answer_later)

    def _report_imports(self, run: int) -> None:
        total_s, took_s, asked = self._imports.take()
        if self._timing is not None:
            self._timing = msgspec.structs.replace(self._timing, in_imports_s=total_s)
        if took_s:
            self._pump.send(Parcel(Imports(run, tuple(took_s), tuple(took_s.values()), asked)))

    def _describe_failure(self, work: Work, error: BaseException) -> Parcel[Any]:
        try:
            _allow_recursion()
            self._interrupts.describe(work.run)
            self._pump.send(Parcel(Failing(work.run)))
            if type(work) is RunCall:
                remember_error(error)
            error = self._failures.as_seen(work.run, error)
            self._note_end(work.run, error)
            if issubclass(type(error), KeyboardInterrupt):
                end_children(work.run)
            answer = self._failures.describe(work.run, error)
            self._context.look_after_failure(traceback_of(error))
        finally:
            self._interrupts.end()
        return answer

    def _note_end(self, run: int, error: BaseException | None) -> None:
        """Close the progress bars of a run that has ended; if this process was forked by user code,
        end it.
        """
        if self._end_child is not None:
            self._end_child(error.as_exit() if isinstance(error, ScriptFailed) else error)
        if self._bars is not None:
            self._bars.end_run(run, error)

    def rescue(self, run: int, error: BaseException, more_follows: bool) -> bool:
        """Send the answer of a run during which `execute` itself raised an exception.

        User code can make any of its lines raise: by a profile function, a recursion limit that is
        too low, a signal handler, or an exception set for this thread. The first two are undone.
        """
        sys.setprofile(None)
        sys.settrace(None)
        _allow_recursion()
        self._interrupts.describe(run)
        self._note_end(run, error)
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
        """If the user has interrupted a run before it began, send its answer without running it;
        return whether this was the case.
        """
        if not self._interrupts.takes_back(run):
            return False
        self._pump.answer(Parcel(interrupted_unbegun(run)), more_follows)
        return True

    def end_as_child(self, end: Callable[[BaseException | None], NoReturn]) -> None:
        """Record that this process was forked from the rank by user code, and has to end after its
        current run.
        """
        self._end_child = end
        for callbacks in self._shell.events.callbacks.values():
            callbacks.clear()  # they show and send data of the rank

    def _call(self, work: RunCall, buffers: tuple[Frame, ...]) -> Parcel[Done] | None:
        function: Any
        if work.function:  # its arguments contain no functions
            function, (names, title) = plain_functions.unpack(work.function), _facts(work.function)
            args, kwargs = pickle.loads(work.payload.stream)
            if names and (parts := bind(function, names, self._namespace)):
                bind_missing_names(parts, self._namespace)
        else:
            function, args, kwargs = payload.loads(work.payload, buffers)
            if work.of_actor:
                title, function = self._context.actors.find(work.of_actor, function)
                bind_missing_names((*args, *kwargs.values()), self._namespace)
            else:
                bind_missing_names((function, *args, *kwargs.values()), self._namespace)
                title = name_of(function)
        record = RunRecord(work.run, title, 0, time.monotonic())
        if title:
            self._tracker.records.append(record)
        try:
            result = function(*args, **kwargs)
            if result is not None and hasattr(type(result), "__await__"):
                if work.interleaves:
                    self._begin_waiting(work, record, result)
                    return None
                result = self._shell.loop_runner(awaiting(result))
        finally:
            sys.settrace(None)  # of the debugger
            if work.run not in self.tasks.calls:
                record.end_s = time.monotonic()
        return None if result is None else self._value(work.run, result, "the result")

    def _script(self, work: RunScript, buffers: tuple[Frame, ...]) -> BaseException | None:
        record = RunRecord(work.run, os.path.basename(work.path), 0, time.monotonic())
        self._tracker.records.append(record)
        on_failing = functools.partial(self._pump.send, Parcel(Failing(work.run)))
        try:
            begin = self._imports.accept_environment
            return run_script(work, self._context, self._pump, self._failures, begin, on_failing)
        finally:
            sys.settrace(None)  # of a debugger
            record.end_s = time.monotonic()

    def _push(self, work: PushNames, buffers: tuple[Frame, ...]) -> None:
        names = payload.loads(work.payload, buffers)
        self._namespace.update(names)
        self._given.forget(names)
        bind_missing_names(names.values(), self._namespace)

    def _push_parts(self, work: PushParts, buffers: tuple[Frame, ...]) -> None:
        names = payload.loads(work.payload, buffers)
        parts = own_parts(names, work, self._groups.rank, self._context.device, self._groups.mesh)
        self._namespace.update(parts)
        self._given.forget(parts)

    def _pull(self, work: PullNames, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        return self._value(work.run, self._evaluate(work.expression), work.expression)

    def _pull_part(self, work: GatherParts, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        part = give_part(self._evaluate(work.expression))
        return self._value(work.run, part, work.expression)

    def _set_mesh(self, work: SetMesh, buffers: tuple[Frame, ...]) -> None:
        mesh = self._groups.build_mesh(work.mesh_dim_names, work.mesh_shape)
        self._namespace["mesh"] = mesh
        self._given.renew(("mesh",))

    def _debug(self, work: PostMortem, buffers: tuple[Frame, ...]) -> None:
        load("rank.debugger").post_mortem()

    def _request(self, work: Request, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        answer = self._context.find_handler(work.body).handle(work.body, buffers)
        if type(answer) is Packed:
            return Parcel(Done(work.run, answer.pickled), tuple(answer.buffers))
        return self._value(work.run, answer, getattr(work.body, "path", "") or "the answer")

    def _cell(self, work: RunCell, buffers: tuple[Frame, ...]) -> BaseException | None:
        if work.interleaves:
            record = RunRecord(work.run, "", work.execution_count, time.monotonic())
            self._tracker.records.append(record)
            awaited = self._shell.run_source_async(
                work.source, work.transformed, work.execution_count, work.quiet
            )
            self._begin_waiting(work, record, awaited)
            return None
        if not work.is_timed:
            return self._run_cell(work)
        stopwatch = Stopwatch(self._groups.ledger.spans)
        stopwatch.start()
        try:
            return self._run_cell(work)
        finally:
            self._timing = stopwatch.stop()

    def _run_cell(self, work: RunCell) -> BaseException | None:
        self._meter.begin(work.execution_count, self._interrupts.num_begun)
        record = RunRecord(work.run, "", work.execution_count, time.monotonic())
        self._tracker.records.append(record)
        if work.argv is not None:
            before, sys.argv = getattr(sys, "argv", [PROGRAM]), [PROGRAM, *work.argv]
        try:
            if self._context.observer is not None:
                self._context.observer.start()
            error = self._shell.run_source(
                work.source, work.transformed, work.code, work.execution_count, work.quiet
            )
            if type(error) is SystemExit and error.args == (
                2,
            ):  # argparse and click: wrong arguments
                error.add_note('`%%dist --argv "--lr 0.1"` gives a cell arguments')
            return error
        finally:
            if self._context.observer is not None:
                self._context.observer.stop()
            if work.argv is not None:
                sys.argv = before
            record.end_s = time.monotonic()
            self._meter.end()
            for name, given in self._given.values.items():
                if self._namespace.get(name, given) is not given:
                    self._say_rebound()
                    break

    def _say_rebound(self) -> None:
        if text := self._given.say():
            with contextlib.suppress(Exception):  # user code may have replaced `sys.stderr`
                print(text, file=sys.stderr)

    def _heal(self, work: Heal, buffers: tuple[Frame, ...]) -> Parcel[Done]:
        self._segments.pool.clear()
        dims, groups = (work.mesh_dim_names, work.mesh_shape), self._groups
        if not work.mesh_dim_names:  # of a mesh without a process group
            return Parcel(Done(work.run))
        if self._needs_groups:
            self._needs_groups = False
            self._namespace["mesh"] = groups.rejoin(work.blueprint, *dims)
            self._given.renew(("mesh",))
        elif work.num_resizes != groups.num_resizes:
            self._notes = resize(work, groups, self._namespace)
            self._given.renew(("mesh", "world_size"))
        ranks, port = frozenset(work.ranks), work.store_port or None
        if work.keeps_groups:
            return Parcel(Done(work.run, notes=groups.reset_models(work.generation, ranks)))
        notes = groups.heal(work.generation, ranks, port, work.store_address)
        notes, self._notes = (*self._notes, *notes), ()
        return Parcel(Done(work.run, notes=notes))

    def _evaluate(self, expression: str) -> Any:
        return eval(compile(expression.strip(), "<expression>", "eval"), self._namespace)

    def _value(self, run: int, value: Any, name: str) -> Parcel[Done]:
        if value is None:
            return Parcel(Done(run))
        has_actors = "actors" in vars(self._context)
        reducer = self._context.handles.reduce if has_actors else reduce_for_notebook
        pickled, buffers = payload.dumps(value, name, reducer)
        if run not in PEER_RUNS and (buffers or len(pickled.stream) >= MIN_BYTES):
            pickled, buffers = self._segments.give(run, pickled, buffers)
        return Parcel(Done(run, pickled), tuple(buffers))
