"""Describes a failed run (cell or call) for the user: the exception shown, and its traceback."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_tb

import msgspec
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import CellmeshError, GroupDown, Released
from ...stdlib import time
from ...wire import payload
from ...wire.codec import Parcel
from ...wire.messages import Failed, describe_place
from ..groups.connections import lost_its_peers
from ..groups.groups import Groups
from ..linux_process import write_stderr
from ..static_lookup import MAX_TEXT, chain_of, handled_by, name_of, text_of, traceback_of
from .interrupts import DescriptionTimeout
from .shell import RankShell
from .stack_inspection import (
    Place,
    StopPoint,
    Waited,
    describe_interruption,
    describe_release,
    place_of,
)
from .value_transfer import reduce_for_notebook

# A larger exception stays on its rank: if all ranks raise one, the notebook would hold all of them.
EXCEPTION_BYTES = 4 << 20
_STOP_NAMES = re.compile(r"\b(KeyboardInterrupt|Released)\b")
_WAITS = f"<its str() raised {DescriptionTimeout.__name__}>"
# Texts with which errors begin that a script would not meet, as its process runs one program and
# ends; and advice for each.
_HINTS = {
    "Default process group has not been initialized": (
        "dist.destroy_process_group() was called on this rank{where}: `dist.init_process_group()` "
        "in a cell on all ranks brings the mesh's groups back, and `mesh` with them"
    ),
    "Can't pickle <class '__main__.": (
        "on this rank the name of that class is bound to something else: if it is a class of the "
        "notebook, `%dist_push` it by its name; if a cell has defined it again since, make the "
        "object again"
    ),
    "Container is already initialized with worker_id": (
        "torch lets a process be one RPC worker, and this rank was another: %dist_restart makes "
        "new ranks"
    ),
}


class ScriptFailed(Exception):
    """Stands for an exception of a script, which its rank has printed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed

    def as_exit(self) -> SystemExit:
        """Return the exception that ends a process with the status of the script."""
        return SystemExit(self.failed.status)


@dataclass(eq=False)
class Failures:
    """Describes the failed runs (cells and calls) of a rank for the user."""

    _shell: RankShell
    _groups: Groups
    # Returns how a run was interrupted or released; None if it was not.
    _stop_of: Callable[[int], StopPoint | None]

    def describe(self, run: int, error: BaseException) -> Parcel[Failed]:
        """Return the `Failed` answer for a run that raised an exception, even if the exception's
        methods raise.
        """
        if isinstance(error, ScriptFailed):
            return Parcel(error.failed)
        try:
            return self._failure(run, error)
        except BaseException as why:
            kind = name_of(error)
            text = f"(not shown: {name_of(why)}: {text_of(why)})"
            return Parcel(Failed(run, kind, text, f"{kind} {text}", 0))

    def as_seen(self, run: int, error: BaseException) -> BaseException:
        """Return the exception to show to the user: if an interrupt, or a release from a
        collective, has caused this one, that one instead.
        """
        seen = _as_interrupt(error)
        # None if others have cut the connections before this rank was stopped.
        stop = self._stop_of(run)
        # A script may catch the interrupt and exit with a status, as click does.
        is_exit = issubclass(type(error), SystemExit)
        # A task is cancelled in place of an interrupt.
        is_exit |= name_of(error) == "CancelledError"
        if stop is not None and seen is error and (is_exit or _has_wrapped_stop(error)):
            return stop.kind().with_traceback(traceback_of(error))
        # By type: ``isinstance`` would read an exception's ``__class__``, which may run code.
        was_cut = lost_its_peers(error) or (
            stop is not None and issubclass(type(error), GroupDown | dist.DistError)
        )
        if issubclass(type(seen), KeyboardInterrupt) or not was_cut or not self._groups.is_broken:
            return seen
        stopped = (Released if stop is None else stop.kind)().with_traceback(traceback_of(error))
        stopped.__cause__ = error
        return stopped

    def is_stopped(self, run: int) -> bool:
        """Return whether a run was interrupted or released."""
        return self._stop_of(run) is not None

    def of_script(self, run: int, error: BaseException, status: int) -> ScriptFailed:
        """Return an exception that describes the one that a script has raised, without holding its
        frames.
        """
        tb = traceback_of(error)
        return ScriptFailed(
            Failed(
                run,
                name_of(error),
                text_of(error),
                "",
                0,
                why_no_payload="it is a script's",
                in_step=interrupted_step(tb),
                inner=self._shell.place_of(tb).inner,
                status=status,
            )
        )

    def _failure(self, run: int, error: BaseException) -> Parcel[Failed]:
        text, tb = text_of(error), traceback_of(error)
        place = self._shell.place_of(tb)
        hint = next((hint for begin, hint in _HINTS.items() if text.startswith(begin)), None)
        if hint is not None:
            by = place_of(self._groups.destroyed_by, self._shell)
            hint = hint.format(where=f" by In[{by.execution_count}] line {by.line}" * bool(by.line))
        with contextlib.suppress(BaseException):  # the exception's own code may raise
            if hint is not None and hint not in getattr(error, "__notes__", ()):
                error.add_note(hint)
        if type(error) is Released:
            return self._release(run, error, place)
        kind, whole = name_of(error), ""
        if issubclass(type(error), KeyboardInterrupt):
            text = text or describe_interruption(tb, handled_by(error))
            text += _describe_handled(error)
            traceback = f"{kind}: {text}{_at(place)}"
        elif issubclass(type(error), CellmeshError):
            traceback = f"{kind}: {text}"
        else:
            traceback, whole = map(_cut, self._shell.render_traceback(error))
        verb = Failed(
            run,
            kind,
            text,
            traceback,
            place.line,
            in_step=interrupted_step(tb),
            inner=place.inner,
            whole_traceback=whole if whole != traceback else "",
        )
        if text == _WAITS:  # the notebook's IPython would call str() again
            return Parcel(msgspec.structs.replace(verb, why_no_payload="its str() takes too long"))
        try:
            pickled, buffers = payload.dumps(error, f"the {kind}", reduce_for_notebook)
        except BaseException as why:  # an `UnpicklableError`, or an error of the exception's code
            return Parcel(msgspec.structs.replace(verb, why_no_payload=text_of(why)))
        num_bytes = len(pickled.stream) + sum(memoryview(buffer).nbytes for buffer in buffers)
        if num_bytes > EXCEPTION_BYTES:
            why_not = (
                f"its pickle has {num_bytes:,} bytes, and at most {EXCEPTION_BYTES >> 20} MiB are "
                "sent to the notebook; it is whole on the rank, as sys.last_value until something "
                "else fails"
            )
            return Parcel(msgspec.structs.replace(verb, why_no_payload=why_not))
        return Parcel(msgspec.structs.replace(verb, payload=pickled), tuple(buffers))

    def _release(self, run: int, error: Released, place: Place) -> Parcel[Failed]:
        """Return the failure of a run whose rank was released from waiting in a collective that
        other ranks will not join.
        """
        stop = self._stop_of(run)
        waited = stop.waited if stop is not None else Waited()
        operation = self._groups.ledger.last
        if error.__cause__ is not None and operation is not None and not waited.collective:
            waited = Waited(operation.name, operation.group, time.monotonic() - operation.since)
        text = (
            f"waited in {waited.collective}"
            if waited.collective
            else describe_release(traceback_of(error), handled_by(error))
        )
        text += _describe_handled(error)
        traceback = f"Released: {text}{_at(place)}"
        pickled, buffers = payload.dumps(Released(text), "Released")
        verb = Failed(
            run,
            "Released",
            text,
            traceback,
            place.line,
            pickled,
            "",
            True,
            waited.collective,
            waited.waited_s,
            interrupted_step(traceback_of(error)),
            inner=place.inner,
            begun=self._groups.ledger.describe_last(),
        )
        return Parcel(verb, tuple(buffers))


def _cut(traceback: str) -> str:
    if len(traceback) <= 4 * MAX_TEXT:
        return traceback
    return f"{traceback[: 2 * MAX_TEXT]}\n…\n{traceback[-2 * MAX_TEXT :]}"


def _at(place: Place) -> str:
    text = describe_place(place.line, place.inner)
    return f" at {text}" if text else ""


def _as_interrupt(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt in an exception's chain of causes; if there is none, the
    exception itself.
    """
    return next(
        (each for each in chain_of(error) if issubclass(type(each), KeyboardInterrupt)), error
    )


def _has_wrapped_stop(error: BaseException) -> bool:
    """Return whether C++ code has replaced the interrupt that stopped a run by an exception of its
    own.

    Python code that C++ calls (hooks, callbacks of futures, ``__torch_function__``, pickling) can
    be interrupted, too; the resulting C++ error contains only the interrupt's text.
    """
    return any(
        not issubclass(type(each), KeyboardInterrupt) and _STOP_NAMES.search(text_of(each))
        for each in chain_of(error)
    )


def _describe_handled(error: BaseException) -> str:
    """Return text on the user's exception that was being handled when an interrupt was raised; ""
    if there was none.
    """
    for each in chain_of(error):
        is_users = issubclass(type(each), Exception) and not issubclass(type(each), GroupDown)
        if is_users and not lost_its_peers(each):
            return f", while handling {name_of(each)}: {text_of(each)}"
    return ""


def interrupted_step(tb: types.TracebackType | None) -> bool:
    """Return whether an exception was raised inside an optimizer's ``step``, so that only some of
    the parameters may have changed.
    """
    return any(
        frame.f_code.co_name == "step" and issubclass(type(frame.f_locals.get("self")), Optimizer)
        for frame, _ in walk_tb(tb)
    )


def find_lost_context() -> str:
    """Return the first line of the error that every CUDA call of this process returns; "" while
    CUDA works.

    Errors such as a device-side assert or an illegal address persist in the context (CUDA Runtime
    API, "Error Handling", on sticky errors): the process can never use its GPU again, and must end.

    Does not block, and does not initialize CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:  # torch.AcceleratorError
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""


def report_lost_context(rank: int, error: str) -> None:
    """Write to descriptor 2 that the rank ends because its CUDA context is lost; the report of its
    death includes these lines.
    """
    write_stderr(
        f"cellmesh: rank {rank} ends: its CUDA context is lost ({error}), and this process can "
        "never use the GPU again.\nA heal starts the rank again. To see the line that failed, set "
        "CUDA_LAUNCH_BLOCKING=1 before the start of the mesh.\n"
    )
