"""rich's progress bars on a rank: each task says its numbers instead of being drawn.

A `rich.progress.Progress` that writes to the rank's own streams gets a live display that draws
nothing; its thread, which would redraw it ten times a second, looks at the tasks. Other displays of
rich's are left alone.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from ...wire.progress import BarState
from .meters import Meter, Meters, Reading, spot_outside
from .tqdm_bars import is_ours


class _Tasks:
    """The tasks of one `Progress`, as meters.

    Args:
        progress: theirs.
        meters: takes them.
        plain: what rich makes of a description with markup: text.
    """

    def __init__(self, progress: Any, meters: Meters, plain: Callable[[str], str]) -> None:
        self._progress = progress
        self._meters = meters
        self._plain = plain
        self._thread = threading.get_ident()  # its own looks at the tasks, too
        self._shown: dict[Any, tuple[Meter, object]] = {}

    def look(self) -> None:
        """See what has changed."""
        tasks = {task.id: task for task in self._progress.tasks if task.visible}
        for gone in self._shown.keys() - tasks.keys():
            self._meters.close(self._shown.pop(gone)[0], "removed")
        for number, task in tasks.items():
            says = _says(task)
            meter, said = self._shown.get(number, (None, None))
            if meter is None:
                meter = self._meters.open(functools.partial(self._read, task), self, self._thread)
            elif says == said:
                continue
            self._shown[number] = meter, says
            self._meters.changed(meter)

    def end(self, failure: type[BaseException] | None) -> None:
        """The display ends.

        Args:
            failure: what has ended it, if it was an exception.
        """
        self.look()
        spot = spot_outside()
        tasks = {task.id: task for task in self._progress.tasks}
        for number, (meter, _) in self._shown.items():
            task = tasks.get(number)
            is_full = task is not None and task.total is not None and task.completed >= task.total
            if self._progress.live.transient:
                self._meters.close(meter, "removed")
            elif is_full:
                self._meters.close(meter, "done")
            elif failure is None or issubclass(failure, GeneratorExit):
                self._meters.close(meter, "done", spot)
            else:
                state: BarState = "stopped" if issubclass(failure, KeyboardInterrupt) else "failed"
                self._meters.close(meter, state)
        self._shown.clear()

    def _read(self, task: Any) -> Reading:
        elapsed_s = float(task.elapsed or 0)
        rate = float(task.speed or 0)
        if task.finished and elapsed_s > 0:
            rate = float(task.completed) / elapsed_s
        return Reading(
            self._plain(str(task.description)),
            float(task.completed),
            float(task.total or 0),
            elapsed_s,
            unit="",
            rate=rate,
            note=_note(task.fields),
        )


def patch_progress(module: types.ModuleType, meters: Meters) -> None:
    """Have the bars of `rich.progress` say their numbers.

    Args:
        module: `rich.progress`.
        meters: takes them.
    """
    from rich import live as lives
    from rich.text import Text

    cls = module.Progress
    plain_init, plain_stop, plain_exit = cls.__init__, cls.stop, cls.__exit__

    def plain(description: str) -> str:
        try:
            return Text.from_markup(description).plain
        except Exception:
            return description

    class MeshLive(lives.Live):
        """Draws nothing, and has the tasks looked at; where the bars are not ours, draws them."""

        def __init__(self, drawn: lives.Live, tasks: _Tasks) -> None:
            super().__init__(
                console=drawn.console,
                auto_refresh=drawn.auto_refresh,
                refresh_per_second=drawn.refresh_per_second,
                transient=drawn.transient,
                redirect_stdout=drawn._redirect_stdout,
                redirect_stderr=drawn._redirect_stderr,
                get_renderable=drawn._get_renderable,
            )
            self.tasks = tasks
            self.failure: type[BaseException] | None = None
            self.draws = False

        def start(self, refresh: bool = False) -> None:
            self.draws = not (meters.is_usable and is_ours(self.console.file))
            if self.draws:
                super().start(refresh)
                return
            with self._lock:
                if self._started:
                    return
                self._started, self.failure = True, None
                self.refresh()
                if self.auto_refresh:
                    self._refresh_thread = lives._RefreshThread(self, self.refresh_per_second)
                    self._refresh_thread.start()

        def refresh(self) -> None:
            if self.draws:
                super().refresh()
                return
            with self._lock:  # its thread looks, too
                self.tasks.look()

        def stop(self) -> None:
            if self.draws:
                super().stop()
                return
            with self._lock:
                if not self._started:
                    return
                self._started = False
                if self._refresh_thread is not None:
                    self._refresh_thread.stop()
                    self._refresh_thread = None
                self.tasks.end(self.failure)

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        if type(self.live) is lives.Live:
            self.live = MeshLive(self.live, _Tasks(self, meters, plain))

    @functools.wraps(plain_stop)
    def stop(self: Any) -> None:
        if not isinstance(self.live, MeshLive) or self.live.draws:
            plain_stop(self)
        elif not self.disable:  # without the empty line that follows where nothing is drawn
            self.live.stop()

    @functools.wraps(plain_exit)
    def __exit__(self: Any, kind: Any, value: Any, traceback: Any) -> None:
        if isinstance(self.live, MeshLive):
            self.live.failure = kind
        plain_exit(self, kind, value, traceback)

    cls.__init__, cls.stop, cls.__exit__ = __init__, stop, __exit__


def _says(task: Any) -> object:
    """What is another thing once a task has changed; None where the user's values do not tell."""
    try:
        # Not the values themselves: of two tensors nobody can say in a word whether they are the
        # same.
        done, total = float(task.completed), float(task.total or 0)
        return done, total, str(task.description), task.start_time, _note(task.fields)
    except Exception:
        return None


def _note(fields: Mapping[str, Any]) -> str:
    """What a task says besides how far it is."""
    if fields.keys() >= {
        "unit_scale",
        "bar_format",
        "postfix",
    }:  # tqdm.rich gives all that tqdm knows
        return str(fields["postfix"] or "")
    said = [(name, value) for name, value in fields.items() if isinstance(value, int | float | str)]
    return ", ".join(f"{name}={_short(value)}" for name, value in said)


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
