"""Patches tqdm and rich on a rank: their bars report numbers to `Meters` instead of drawing lines.

`tqdm.std.tqdm` and `rich.progress.Progress` are changed in place when they are imported, so that
what derives from them (asyncio, auto, a user's own class) follows. A bar with a file of the user's
own is drawn as ever, and so are bars in processes that user code forked.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ...wire.progress import Bar, BarState
from ..rank.import_hooks import AfterImport
from ..rank.streams import RankStream
from .meters import Meter, Meters, spot_outside


def watch_bars(meters: Meters) -> None:
    """Have the bars of tqdm and rich report their numbers to `meters`."""
    patches = {
        "tqdm.std": patch_std, "tqdm.notebook": patch_notebook, "rich.progress": patch_rich
    }  # fmt: skip
    hooks = {name: functools.partial(_patch, patch, meters) for name, patch in patches.items()}
    for name in hooks.keys() & sys.modules.keys():  # preloaded
        hooks.pop(name)(sys.modules[name])
    AfterImport(hooks).install()


def _patch(
    patch: Callable[[types.ModuleType, Meters], None], meters: Meters, module: types.ModuleType
) -> None:
    try:
        patch(module, meters)
    except Exception:  # another version of it: bars are drawn as it draws them
        traceback.print_exc(file=sys.__stderr__)


def is_ours(file: Any) -> bool:
    """Return whether a file object is the rank's stdout or stderr, or a wrapper of it."""
    for _ in range(4):
        if isinstance(file, RankStream):
            return True
        file = getattr(file, "_wrapped", None)
    return False


def _state_after(failure: type[BaseException] | None) -> BarState:
    if failure is None or issubclass(failure, GeneratorExit | StopIteration):
        return "done"
    return "stopped" if issubclass(failure, KeyboardInterrupt) else "failed"


# ---- tqdm


class _Nowhere:
    """A text file that drops everything written to it."""

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...


def patch_std(module: types.ModuleType, meters: Meters) -> None:
    """Have the bars of the module `tqdm.std` report their numbers."""
    cls = module.tqdm
    plain_display, plain_clear = cls.display, cls.clear
    plain_close, plain_exit = cls.close, cls.__exit__
    loop = cls.__iter__.__code__

    def is_reported(bar: Any) -> bool:
        is_drawn = not getattr(bar, "disable", True) and not getattr(bar, "gui", True)
        return is_drawn and meters.is_usable and is_ours(getattr(bar, "fp", None))

    @functools.wraps(plain_display)
    def display(self: Any, msg: str | None = None, pos: int | None = None) -> Any:
        if not is_reported(self):
            return plain_display(self, msg, pos)
        if getattr(self, "_cellmesh_meter", None) is None:
            self._cellmesh_meter = meters.open(_reader(self))
        meters.changed(self._cellmesh_meter)
        return True

    @functools.wraps(plain_clear)
    def clear(self: Any, nolock: bool = False) -> None:
        if not is_reported(self):
            plain_clear(self, nolock)

    @functools.wraps(plain_close)
    def close(self: Any) -> None:
        if not is_reported(self):
            plain_close(self)
            return
        failure, caller = getattr(self, "_cellmesh_failure", None), sys._getframe(1)
        if failure is None and caller.f_code is loop:  # what it iterates over has raised
            failure = sys.exc_info()[0]
        leaves = abs(self.pos) == 0 if self.leave is None else self.leave
        self.sp, self.fp = _ignore, _Nowhere()
        plain_close(self)
        meter = getattr(self, "_cellmesh_meter", None)
        if meter is None:
            return
        reading = _read_tqdm(self)
        meter.read = lambda: reading
        state = _state_after(failure)
        if state == "done" and not leaves:
            meters.close(meter, "removed")
        elif state == "done" and not 0 < reading.total <= reading.done:
            meters.close(meter, "done", spot_outside())
        else:
            meters.close(meter, state)

    @functools.wraps(plain_exit)
    def __exit__(self: Any, kind: Any, value: Any, traceback: Any) -> None:
        self._cellmesh_failure = kind
        plain_exit(self, kind, value, traceback)

    cls.display, cls.clear, cls.close, cls.__exit__ = display, clear, close, __exit__


def patch_notebook(module: types.ModuleType, meters: Meters) -> None:
    """Have the module `tqdm.notebook` make bars of `tqdm.std`, as its own are widgets."""
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


def _ignore(text: str) -> None: ...


def _reader(bar: Any) -> Callable[[], Bar | None]:
    of = weakref.ref(bar)  # a bar that nobody holds ends

    def read() -> Bar | None:
        living = of()
        return None if living is None else _read_tqdm(living)

    return read


def _read_tqdm(bar: Any) -> Bar:
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
    return Bar(0, 0, title, done, total, elapsed_s, str(facts["unit"]), divisor, rate, note)


def _number(value: Any) -> float:
    try:
        return 0.0 if value is None else float(value)
    except Exception:
        return 0.0


# ---- rich


class RichTasks:
    """Shows the tasks of one running `rich.progress.Progress` as bars of `Meters`.

    It has the lock and the method `refresh` that rich's refresh thread needs of a live display.
    """

    def __init__(self, progress: Any, meters: Meters) -> None:
        self._progress = progress
        self._meters = meters
        self._owner = threading.get_ident()  # the refresh thread looks at the tasks, too
        self._shown: dict[Any, tuple[Meter, object]] = {}
        self._lock = threading.RLock()
        self._thread: Any = None

    def start(self) -> None:
        """Report the tasks now and, if rich would redraw by itself, as often as rich would."""
        from rich.live import _RefreshThread

        self.refresh()
        live = self._progress.live
        if live.auto_refresh:
            thread: Any = _RefreshThread
            self._thread = thread(self, live.refresh_per_second)
            self._thread.start()

    def refresh(self) -> None:
        """Report the tasks that have changed."""
        with self._lock:
            tasks = {task.id: task for task in self._progress.tasks if task.visible}
            for gone in self._shown.keys() - tasks.keys():
                self._meters.close(self._shown.pop(gone)[0], "removed")
            for number, task in tasks.items():
                state = _rich_state(task)
                meter, last = self._shown.get(number, (None, None))
                if meter is None:
                    read = functools.partial(_read_rich, task)
                    meter = self._meters.open(read, self, self._owner)
                elif state is not None and state == last:
                    continue
                self._shown[number] = meter, state
                self._meters.changed(meter)

    def end(self, failure: type[BaseException] | None) -> None:
        """Close the tasks' bars, as the display ends, by this exception or by none."""
        with self._lock:
            if self._thread is not None:
                self._thread.stop()
            self.refresh()
            spot = spot_outside()
            tasks = {task.id: task for task in self._progress.tasks}
            for number, (meter, _) in self._shown.items():
                task = tasks.get(number)  # another thread may have removed it
                is_full = bool(task and task.total is not None and task.completed >= task.total)
                if self._progress.live.transient:
                    self._meters.close(meter, "removed")
                elif is_full or (state := _state_after(failure)) == "done":
                    self._meters.close(meter, "done", None if is_full else spot)
                else:
                    self._meters.close(meter, state)


def patch_rich(module: types.ModuleType, meters: Meters) -> None:
    """Have the bars of the module `rich.progress` report their numbers."""
    cls = module.Progress
    plain_start, plain_stop = cls.start, cls.stop
    plain_refresh, plain_exit = cls.refresh, cls.__exit__

    @functools.wraps(plain_start)
    def start(self: Any) -> None:
        if self.disable or not (meters.is_usable and is_ours(self.console.file)):
            plain_start(self)
        elif not self.live.is_started:
            self.live._started = True  # `track` goes on while it is
            self._cellmesh_failure = None
            self._cellmesh_tasks = RichTasks(self, meters)
            self._cellmesh_tasks.start()

    @functools.wraps(plain_refresh)
    def refresh(self: Any) -> None:
        tasks = getattr(self, "_cellmesh_tasks", None)
        if tasks is None:
            plain_refresh(self)
        else:
            tasks.refresh()

    @functools.wraps(plain_stop)
    def stop(self: Any) -> None:
        tasks = getattr(self, "_cellmesh_tasks", None)
        if tasks is None:
            plain_stop(self)
        else:
            self.live._started, self._cellmesh_tasks = False, None
            tasks.end(self._cellmesh_failure)

    @functools.wraps(plain_exit)
    def __exit__(self: Any, kind: Any, value: Any, traceback: Any) -> None:
        self._cellmesh_failure = kind
        plain_exit(self, kind, value, traceback)

    cls.start, cls.refresh, cls.stop, cls.__exit__ = start, refresh, stop, __exit__


def _read_rich(task: Any) -> Bar:
    done, total, elapsed_s = float(task.completed), float(task.total or 0), float(task.elapsed or 0)
    rate = done / elapsed_s if task.finished and elapsed_s > 0 else float(task.speed or 0)
    title = _without_markup(str(task.description))
    return Bar(0, 0, title, done, total, elapsed_s, unit="", rate=rate, note=_note(task.fields))


def _without_markup(description: str) -> str:
    from rich.text import Text

    try:
        return Text.from_markup(description).plain
    except Exception:
        return description


def _rich_state(task: Any) -> object:
    """Return the values of a rich task that decide whether the bar has changed; None where the
    user's objects cannot be compared.

    The values themselves do not: two tensors cannot be compared in a word.
    """
    try:
        done, total = float(task.completed), float(task.total or 0)
        return done, total, str(task.description), task.start_time, _note(task.fields)
    except Exception:
        return None


def _note(fields: Mapping[str, Any]) -> str:
    """Return the text that a task of rich shows beside its progress."""
    if fields.keys() >= {"unit_scale", "bar_format", "postfix"}:  # tqdm.rich gives all of tqdm's
        return str(fields["postfix"] or "")
    shown = [
        (name, value) for name, value in fields.items() if isinstance(value, int | float | str)
    ]
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in shown
    )
