"""Makes tqdm's bars on a rank send their numbers, which the notebook shows as one bar for all
ranks.

When `tqdm.std` is imported, `tqdm.std.tqdm.display`, which tqdm documents as overridable, is
replaced, so that derived classes (asyncio, auto, a user's own) follow. Bars with a file of the
user's own, bars of other libraries, and bars in processes that user code has forked are drawn as
usual.
"""

from __future__ import annotations

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
from ..wire.verbs import Bar
from .rank.imports import AfterImport
from .rank.streams import RankStream

_MAX_TEXT = 200


@dataclass(eq=False)
class _Reported:
    """A tqdm bar of this rank that was reported: a weak reference to it, its thread, and its last
    numbers.
    """

    bar: weakref.ref[Any]
    thread: int
    last: Bar


class TqdmBars:
    """The tqdm bars on one rank, whose numbers it sends to the notebook; usable on any thread.

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

    def watch(self) -> None:
        """Make tqdm's bars report to this object, once user code has imported tqdm."""
        hooks = {"tqdm.std": self._patch, "tqdm.notebook": _make_text_bars}
        for name in hooks.keys() & sys.modules.keys():  # preloaded modules
            hooks.pop(name)(sys.modules[name])
        AfterImport(hooks).install()

    @property
    def has_news(self) -> bool:
        """Whether a tqdm bar is open on this rank, so that it may have numbers to send."""
        return bool(self._open)

    def end_run(self, run: int, error: BaseException | None) -> None:
        """Send the last numbers of the bars of a run that ends; if it ends by an exception, mark
        the bars of this thread, the main one, as ended.
        """
        for number, reported in list(self._open.items()):
            if reported.last.run != run:
                continue
            last = _read(reported)
            if error is not None and reported.thread == threading.get_ident():
                self._open.pop(number, None)
                last = msgspec.structs.replace(last, state="done")
            self._send(Parcel(last))

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
        state = "removed" if is_removed else "done"
        self._send(Parcel(msgspec.structs.replace(_read(reported), state=state)))


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
    """Return whether a file object is the rank's stdout or stderr, or tqdm's wrapper of it, for
    which bars are sent as such, not drawn as text.
    """
    stream = file if isinstance(file, RankStream) else getattr(file, "_wrapped", None)
    return isinstance(stream, RankStream)


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
