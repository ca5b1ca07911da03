"""Makes tqdm's bars on a rank send their numbers, which the notebook shows as one bar for all
ranks.

When `tqdm.std` is imported, `tqdm.std.tqdm.display`, which tqdm documents as overridable, is
replaced, so that derived classes (asyncio, auto, a user's own) follow. Bars with a file of the
user's own, bars of other libraries, and bars in processes that user code has forked are drawn as
usual.
"""

from __future__ import annotations

import collections
import dis
import io
import itertools
import math
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from ..stdlib import os, threading
from ..wire.codec import Parcel
from ..wire.user_code import Bar, BarState
from .rank.imports import AfterImport
from .rank.streams import RankStream
from .static_lookup import chain_of, module_of, traceback_of

_MAX_LEFT = 100
_MAX_TEXT = 200

# (identity of a frame, offset of an instruction in it); offset -1 for any instruction.
Place = tuple[int, int]


@dataclass(eq=False)
class _Reported:
    """A bar of this rank, by weak reference, with its thread and its last numbers."""

    bar: weakref.ref[Any]
    thread: int
    last: Bar


class TqdmBars:
    """The tqdm bars of one rank; usable on any thread.

    Args:
        send: sends a message, after the output printed before it.
        current_run: returns the run that the caller belongs to.
        shield: context in which interrupts are deferred.
    """

    def __init__(
        self,
        send: Callable[[Parcel[Any]], None],
        current_run: Callable[[], int],
        shield: AbstractContextManager[Any, Any],
    ) -> None:
        self._send = send
        self._current_run = current_run
        self._shield = shield
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._open: dict[int, _Reported] = {}
        # Bars that ended before they were full, and the place where code left each.
        self._left: collections.deque[tuple[Place, Bar]] = collections.deque(maxlen=_MAX_LEFT)

    def watch(self) -> None:
        """Make bars of tqdm report to this object, from the import of tqdm on."""
        hooks = {"tqdm.std": self._patch, "tqdm.notebook": _make_text_bars}
        for name in hooks.keys() & sys.modules.keys():  # preloaded modules
            hooks.pop(name)(sys.modules[name])
        AfterImport(hooks).install()

    @property
    def has_news(self) -> bool:
        """Whether a bar is open, or has ended early since the last run."""
        return bool(self._open or self._left)

    def end_run(self, run: int, error: BaseException | None) -> None:
        """Send the last numbers of a run's bars, with a failure state for bars that `error` has
        ended. Main thread.
        """
        left = [self._left.popleft() for _ in range(len(self._left))]
        state: BarState = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        places = _places_of(error)
        failed = [bar for place, bar in left if place in places]
        for number, reported in list(self._open.items()):
            if reported.last.run != run:
                continue
            _read(reported)
            if error is not None and reported.thread == threading.get_ident():
                self._open.pop(number, None)
                failed.append(reported.last)
            else:
                self._send(Parcel(reported.last))
        for bar in failed:
            self._send(Parcel(msgspec.structs.replace(bar, state=state)))

    # ---- internal

    def _patch(self, module: types.ModuleType) -> None:
        plain_display = module.tqdm.display

        def display(bar: Any, msg: str | None = None, pos: int | None = None) -> Any:
            is_ours = hasattr(bar, "_cellmesh_number") or _is_ours(getattr(bar, "fp", None))
            if not is_ours or os.getpid() != self._pid:
                return plain_display(bar, msg, pos)
            with self._shield:
                if bar.disable:  # the last call, from `close`
                    self._close(bar, is_removed=msg == "")
                else:
                    self._report(bar)
            return True

        module.tqdm.display = display

    def _report(self, bar: Any) -> None:
        reported = self._open.get(getattr(bar, "_cellmesh_number", 0))
        if reported is None:
            thread, number = threading.get_ident(), next(self._numbers)
            num_outer = sum(each.thread == thread for each in list(self._open.values()))
            first = Bar(self._current_run(), number, "", 0.0, 0.0, 0.0, num_outer=num_outer)
            reported = self._open[number] = _Reported(weakref.ref(bar), thread, first)
            bar._cellmesh_number = number
            bar.sp, bar.fp = _ignore, io.StringIO()  # tqdm clears and closes these itself
        self._send(Parcel(_read(reported)))

    def _close(self, bar: Any, is_removed: bool) -> None:
        reported = self._open.pop(bar._cellmesh_number, None)
        if reported is None:
            return
        last = _read(reported)
        state: BarState = "removed" if is_removed else "done"
        if not 0 < last.total <= last.done:
            failure = sys.exc_info()[0]  # raised in the bar's ``with`` block or by its iterable
            if failure is not None and not issubclass(failure, GeneratorExit | StopIteration):
                state = "stopped" if issubclass(failure, KeyboardInterrupt) else "failed"
            elif not is_removed:
                self._left.append((_place_outside(), last))
        self._send(Parcel(msgspec.structs.replace(last, state=state)))


def _make_text_bars(module: types.ModuleType) -> None:
    """Replace the bars of `tqdm.notebook`, which are widgets, by bars of `tqdm.std`."""
    std: Any = sys.modules["tqdm.std"].tqdm

    class tqdm_notebook(std):  # type: ignore[misc]
        """A `tqdm.tqdm` bar, which the notebook shows as one bar for all ranks."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            kwargs["disable"] = bool(kwargs.get("disable", False))  # None means False here
            super().__init__(*args, **kwargs)

    def trange(*args: Any, **kwargs: Any) -> Any:
        """``tqdm.notebook.tqdm(range(*args), **kwargs)``."""
        return tqdm_notebook(range(*args), **kwargs)

    vars(module).update(
        tqdm_notebook=tqdm_notebook, tqdm=tqdm_notebook, tnrange=trange, trange=trange
    )


def _is_ours(file: Any) -> bool:
    """Return whether a file object is the rank's stdout or stderr, or tqdm's wrapper of it."""
    return isinstance(file, RankStream) or isinstance(getattr(file, "_wrapped", None), RankStream)


def _ignore(text: str) -> None: ...


def _read(reported: _Reported) -> Bar:
    """Return a bar's current numbers; the previous ones if they cannot be read."""
    try:
        facts = reported.bar().format_dict  # type: ignore[union-attr]
        scale = facts["unit_scale"]
        is_scaled = scale is True or scale == 1
        factor = 1 if is_scaled else scale or 1
        done, total, elapsed_s = facts["n"], facts["total"] or 0, facts["elapsed"] or 0
        rate = facts["rate"] or (done - facts.get("initial", 0)) / (elapsed_s or math.inf)
        reported.last = msgspec.structs.replace(
            reported.last,
            title=_text(facts["prefix"]).rstrip().removesuffix(":"),
            done=_finite(done * factor),
            total=_finite(total * factor),
            elapsed_s=_finite(elapsed_s),
            unit=_text(facts["unit"]),
            divisor=int(facts["unit_divisor"] or 1000) if is_scaled else 0,
            rate=_finite(rate * factor),
            note=_text(facts["postfix"]),
        )
    except Exception:  # the bar was freed, or is of a user's class
        pass
    return reported.last


def _finite(value: Any) -> float:
    """Return a bar's number; 0 (unknown) for infinity and NaN."""
    number = float(value)
    return number if math.isfinite(number) else 0.0


def _text(text: Any) -> str:
    """Return a bar's text, truncated, without lone surrogates, which cannot be sent."""
    return str(text or "")[:_MAX_TEXT].encode(errors="replace").decode()


def _place_outside() -> Place:
    """Return the place where user code leaves a loop before its bar is full: at a ``break``, or at
    an exception that is being raised.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and module_of(frame).startswith(("tqdm", "cellmesh.")):
        frame = frame.f_back
    # A ``finally`` raises an exception again at another instruction than the original one.
    is_again = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "RERAISE"
    return id(frame), -1 if is_again else frame.f_lasti


def _places_of(error: BaseException | None) -> set[Place]:
    """Return the places in user code that an exception, or one that caused it, has passed."""
    places: set[Place] = set()
    for each in chain_of(error) if error is not None else ():
        tb = traceback_of(each)
        while tb is not None:
            places |= {(id(tb.tb_frame), tb.tb_lasti), (id(tb.tb_frame), -1)}
            tb = tb.tb_next
    return places
