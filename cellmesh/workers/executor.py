"""Runs work on the rank's main thread and answers it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CellmeshError, UnpicklableError
from ..wire import payload
from ..wire.framing import Frame, Parcel
from ..wire.messages import (
    Done,
    Failed,
    Inspect,
    PullNames,
    PushNames,
    RunCall,
    RunCell,
    SetMesh,
    Work,
)
from .activity import describe_interruption
from .borrowing import bind_missing_names
from .groups import Groups
from .inspection import describe, is_dtensor
from .interrupts import Interrupts
from .processes import flush_c_stdio
from .shell import RankShell
from .streams import Pump, RunTracker

_MAX_TEXT = 10_000


class Executor:
    """Executes work, one piece after another.

    Args:
        shell: runs cells; its namespace is the rank's.
        groups: the rank's process groups.
        pump: takes answers, after all output.
        tracker: told which run executes.
        interrupts: told which run may be interrupted.
    """

    def __init__(
        self,
        shell: RankShell,
        groups: Groups,
        pump: Pump,
        tracker: RunTracker,
        interrupts: Interrupts,
    ) -> None:
        self._shell = shell
        self._groups = groups
        self._pump = pump
        self._tracker = tracker
        self._interrupts = interrupts

    def execute(self, parcel: Parcel[Work], more_follows: bool) -> None:
        """Run one piece of work and send its answer, whatever happens in it.

        Args:
            parcel: the work.
            more_follows: another piece waits behind it.
        """
        work, buffers = parcel
        self._tracker.enter(work.run)
        outcome: Parcel[Done] | BaseException
        try:
            try:
                self._interrupts.begin(work.run)
                outcome = self._perform(work, buffers)
            finally:
                self._interrupts.end()
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the rank stays
            outcome = error
        if isinstance(outcome, BaseException):
            answer: Parcel[Any] = self._safe_failure(work.run, _as_interrupt(outcome))
        else:
            answer = outcome
        if type(work) is RunCell:
            flush_c_stdio()
        self._tracker.enter(-1)
        self._pump.send(answer, ends_run=True, more_follows=more_follows)

    def _perform(self, work: Work, buffers: tuple[Frame, ...]) -> Parcel[Done] | BaseException:
        match work:
            case RunCall():
                function, args, kwargs = payload.loads(work.payload, buffers)
                bind_missing_names((function, args, kwargs), self._shell.user_ns)
                return self._value(work.run, function(*args, **kwargs), "the result")
            case RunCell():
                error = self._shell.run_source(
                    work.source, work.transformed, work.is_async, work.execution_count, work.quiet
                )
                return Parcel(Done(work.run)) if error is None else error
            case PushNames():
                names = payload.loads(work.payload, buffers)
                self._shell.user_ns.update(names)
                bind_missing_names(names, self._shell.user_ns)
                return Parcel(Done(work.run))
            case PullNames():
                return self._value(work.run, self._evaluate(work.expression), work.expression)
            case Inspect():
                facts = describe(self._evaluate(work.expression))
                return self._value(work.run, facts, work.expression)
            case SetMesh():
                mesh = self._groups.build_mesh(work.mesh_dim_names, work.mesh_shape)
                self._shell.user_ns["mesh"] = mesh
                return Parcel(Done(work.run))

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
            return Parcel(Failed(run, kind, "", f"{kind} (not shown: {type(why).__name__}: {why})", 0))

    def _failure(self, run: int, error: BaseException) -> Parcel[Failed]:
        text = _text_of(error)
        line = self._shell.line_in_cell(error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            text = text or describe_interruption(error.__traceback__, error.__context__)
            traceback = f"{type(error).__name__}: {text}" + (f" at line {line}" if line else "")
        elif isinstance(error, CellmeshError):
            traceback = f"{type(error).__name__}: {text}"
        else:
            traceback = self._shell.render_traceback(error)
            if len(traceback) > 4 * _MAX_TEXT:
                traceback = f"{traceback[: 2 * _MAX_TEXT]}\n…\n{traceback[-2 * _MAX_TEXT :]}"
        kind = type(error).__name__
        try:
            pickled, buffers = payload.dumps(error, f"the {kind}", reduce_for_notebook)
        except UnpicklableError as why:
            return Parcel(Failed(run, kind, text, traceback, line, None, str(why)))
        return Parcel(Failed(run, kind, text, traceback, line, pickled), tuple(buffers))


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
