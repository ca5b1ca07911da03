"""tqdm on a rank: its bars say their numbers instead of drawing their lines.

`tqdm.std.tqdm` is changed in place, so that what derives from it (asyncio, auto, a user's own)
follows; its loop, and when it looks at the clock, stay as they are. A bar with a file of the user's
own is left alone, and so are bars in processes that user code forked.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from ...wire.progress import BarState
from ..rank.streams import RankStream
from .meters import Meter, Meters, Reading, spot_outside


class _Printer:
    """Stands where tqdm keeps what writes a bar's line.

    Args:
        write: writes a line as plain tqdm does.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self.meter: Meter | None = None
        self.failure: type[BaseException] | None = None

    def __call__(self, text: str) -> None:
        self._write(text)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


def patch_std(module: types.ModuleType, meters: Meters) -> None:
    """Have the bars of `tqdm.std` say their numbers.

    Args:
        module: `tqdm.std`.
        meters: takes them.
    """
    cls = module.tqdm
    plain_printer, plain_display = cls.status_printer, cls.display
    plain_clear, plain_close, plain_exit = cls.clear, cls.close, cls.__exit__
    loop = cls.__iter__.__code__

    def printer_of(bar: Any) -> _Printer | None:
        printer = bar.__dict__.get("sp")
        return printer if type(printer) is _Printer and meters.is_usable else None

    @functools.wraps(plain_printer)
    def status_printer(file: Any) -> Any:
        write = plain_printer(file)
        return _Printer(write) if meters.is_usable and is_ours(file) else write

    @functools.wraps(plain_display)
    def display(self: Any, msg: str | None = None, pos: int | None = None) -> Any:
        printer = printer_of(self)
        if printer is None:
            return plain_display(self, msg, pos)
        if printer.meter is None:
            printer.meter = meters.open(_reader(self))
        meters.changed(printer.meter)
        return True

    @functools.wraps(plain_clear)
    def clear(self: Any, nolock: bool = False) -> None:
        if printer_of(self) is None:
            plain_clear(self, nolock)

    @functools.wraps(plain_close)
    def close(self: Any) -> None:
        printer = None if getattr(self, "disable", True) else printer_of(self)
        if printer is None:
            plain_close(self)
            return
        failure, caller = printer.failure, sys._getframe(1)
        if failure is None and caller.f_code is loop:  # what it iterates over has raised
            failure = sys.exc_info()[0]
        leaves = abs(self.pos) == 0 if self.leave is None else self.leave
        self.sp, self.fp = _ignore, _Nowhere()
        plain_close(self)
        if printer.meter is None:
            return
        reading = _read(self)
        printer.meter.read = lambda: reading
        state = _state_after(failure)
        if state == "done" and not leaves:
            meters.close(printer.meter, "removed")
        elif state == "done" and not 0 < reading.total <= reading.done:
            meters.close(printer.meter, "done", spot_outside())
        else:
            meters.close(printer.meter, state)

    @functools.wraps(plain_exit)
    def __exit__(self: Any, kind: Any, value: Any, traceback: Any) -> None:
        printer = printer_of(self)
        if printer is not None:
            printer.failure = kind
        plain_exit(self, kind, value, traceback)

    cls.status_printer = staticmethod(status_printer)
    cls.display, cls.clear, cls.close, cls.__exit__ = display, clear, close, __exit__


def patch_notebook(module: types.ModuleType, meters: Meters) -> None:
    """Have `tqdm.notebook` give the bars of `tqdm.std`: its own are widgets.

    Args:
        module: `tqdm.notebook`.
        meters: unused; as `patch_std`.
    """
    std: Any = sys.modules["tqdm.std"].tqdm

    class tqdm_notebook(std):  # type: ignore[misc]
        """`tqdm.tqdm`, which shows one bar for all ranks in the notebook."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            kwargs["disable"] = bool(kwargs.get("disable", False))  # None: as in any notebook
            super().__init__(*args, **kwargs)

    def tnrange(*args: Any, **kwargs: Any) -> Any:
        """``tqdm.notebook.tqdm(range(*args), **kwargs)``."""
        return tqdm_notebook(range(*args), **kwargs)

    tqdm_notebook.__module__ = tnrange.__module__ = module.__name__
    tqdm_notebook.__qualname__ = "tqdm_notebook"
    vars(module).update(
        tqdm_notebook=tqdm_notebook, tqdm=tqdm_notebook, tnrange=tnrange, trange=tnrange
    )


def is_ours(file: Any) -> bool:
    """Whether a file is the rank's stdout or stderr, maybe wrapped."""
    for _ in range(4):
        if isinstance(file, RankStream):
            return True
        file = getattr(file, "_wrapped", None)
    return False


def _ignore(text: str) -> None: ...


def _state_after(failure: type[BaseException] | None) -> BarState:
    if failure is None or issubclass(failure, GeneratorExit | StopIteration):
        return "done"
    return "stopped" if issubclass(failure, KeyboardInterrupt) else "failed"


def _reader(bar: Any) -> Callable[[], Reading | None]:
    of = weakref.ref(bar)  # a bar that nobody holds ends

    def read() -> Reading | None:
        living = of()
        return None if living is None else _read(living)

    return read


def _read(bar: Any) -> Reading:
    facts = bar.format_dict
    done, total, elapsed_s = _number(facts["n"]), _number(facts["total"]), _number(facts["elapsed"])
    rate = _number(facts["rate"])
    if not rate and elapsed_s > 0:
        rate = (done - _number(facts.get("initial"))) / elapsed_s
    scale, divisor = facts["unit_scale"], 0
    if scale is True or scale == 1:
        divisor = int(_number(facts["unit_divisor"])) or 1000
    elif scale:
        done, total, rate = done * scale, total * scale, rate * scale
    title = str(facts["prefix"] or "").rstrip().removesuffix(":")
    note = str(facts["postfix"] or "")
    return Reading(title, done, total, elapsed_s, str(facts["unit"]), divisor, rate, note)


def _number(value: Any) -> float:
    try:
        return 0.0 if value is None else float(value)
    except Exception:
        return 0.0
