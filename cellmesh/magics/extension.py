"""The IPython extension: registers the magics of `commands.Commands` in a shell, and shows
cellmesh's objects as widgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.display import display

from ..controller.arguments import CellSyntaxError
from ..errors import MeshUsageError, RankFailure
from .auto import AUTO_MAGIC, make_transformer
from .commands import Commands
from .completion import CellCompletion
from .options import CELL_MAGICS, COMMANDS, describe, parse, wants_help


def _register_displays(formatter: DisplayFormatter) -> None:
    """Make an IPython formatter show plots and inspections as widgets, whose modules are imported
    when they are first needed.
    """
    for module, name, show in (
        ("cellmesh.controller.metrics", "Plot", _show_plot),
        ("cellmesh.controller.inspect", "Inspection", _show_inspection),
    ):
        formatter.ipython_display_formatter.for_type_by_name(module, name, show)


def _show_plot(plot: Any) -> None:
    from .views.plot.plot import LivePlot

    plot.shown.print_heading()
    LivePlot(plot).view._ipython_display_()


def _show_inspection(inspection: Any) -> None:
    if inspection.ranks is not None:
        from .views.inspector.inspector import show_inspection

        show_inspection(inspection.ranks, inspection)
        return
    from .render.inspections import static_of

    static = static_of(inspection)
    display({"text/plain": static.text, "text/html": static.html}, raw=True)  # type: ignore[no-untyped-call]


def wake_at_signals() -> None:
    """Let signals wake the event loop of the kernel on whose main thread this is called.

    On a signal, ipykernel's handler adds the cancellation of an awaited cell to the loop, which
    otherwise goes on waiting until its next event: the stop button has no effect on ``await run``.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # no loop runs here; not the main thread
        loop = asyncio.get_running_loop()
        if (before := signal.set_wakeup_fd(-1)) != -1:  # loaded before
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            return
        wakened, waker = os.pipe()
        os.set_blocking(waker, False)
        loop.add_reader(wakened, os.read, wakened, 4096)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)


class Extension:
    """The parts of the extension in one IPython shell: magics, completion, displays, transformer.

    Args:
        shell: shell in which they are registered.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.commands = Commands(shell)
        self.is_registered = False
        self._failures = FailureDisplay(shell)
        self._transformer = make_transformer(lambda: self.commands.is_auto)
        self._completion = CellCompletion(
            shell, self.commands.mesh_of, self.commands.read_cell, self.commands.mesh_names
        )

    def register(self) -> None:
        """Register the magics, auto mode's input transformer, completion and error display."""
        for name in COMMANDS:
            kind = "line_cell" if name in CELL_MAGICS else "line"
            self._register(name, kind, functools.partial(self._call, name), describe(name))
        auto = self.commands.auto_cell
        self._register(AUTO_MAGIC, "cell", lambda line, cell: auto(cell), "(auto mode)")
        self._shell.input_transformers_cleanup.append(self._transformer)
        self._shell.events.register("post_run_cell", self.commands.recorder.close_cell)
        self._shell.events.register("post_run_cell", self.commands.await_recovery)
        self._shell.events.register("post_run_cell", propose_magic)
        self._completion.install()
        wake_at_signals()
        if self._shell.display_formatter is not None:
            _register_displays(self._shell.display_formatter)
        self._failures.install()
        self.is_registered = True

    def unregister(self) -> None:
        """Undo `register`, except for displays; the mesh keeps running, for a later `register`."""
        self.is_registered = False
        self._failures.remove()
        self._completion.remove()
        self._shell.input_transformers_cleanup.remove(self._transformer)
        self._shell.events.unregister("post_run_cell", self.commands.recorder.close_cell)
        self._shell.events.unregister("post_run_cell", self.commands.await_recovery)
        self._shell.events.unregister("post_run_cell", propose_magic)
        for kind in self._shell.magics_manager.magics.values():
            for name in [
                name for name, function in kind.items() if getattr(function, "cellmesh", False)
            ]:
                del kind[name]

    def _register(self, name: str, kind: str, function: Callable[..., Any], text: str) -> None:
        def magic(*args: str) -> Any:
            return function(*args)

        magic.__doc__ = text
        magic.cellmesh = True  # type: ignore[attr-defined]
        self._shell.register_magic_function(magic, kind, name)  # type: ignore[arg-type]

    def _call(self, name: str, line: str, cell: str | None = None) -> Any:
        """Run a magic with its line and, for a cell magic, the rest of the cell."""
        if wants_help(line):
            print(describe(name))
            return None
        options, method = parse(name, line), getattr(self.commands, name)
        if name in CELL_MAGICS:
            if cell is None:
                raise MeshUsageError(f"%{name} runs a whole cell: write %%{name} on its first line")
            return method(options, cell, line)
        result = method(options)
        count, mesh = self.commands.execution_count(), self.commands.mesh_of(options)
        self.commands.recorder.magic(count, name, line, options, mesh)
        return result


class FailureDisplay:
    """Shows failures of ranks and syntax errors of cells in one shell, without frames of cellmesh.

    IPython prints exception groups whole. Its slot for a handler of exceptions (`set_custom_exc`)
    is left to the user, and libraries replace the shell's display of tracebacks. So this class
    wraps ``showtraceback``, which a user's handler and such libraries call, and uses the display of
    the shell's class.

    Args:
        shell: shell of the notebook.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._before: Callable[..., None] | None = None
        self._is_on = False

    def install(self) -> None:
        """Start to show failures."""
        self._is_on = True
        if self._before is None:
            self._before = self._shell.showtraceback
            self._shell.showtraceback = self._show  # type: ignore[method-assign]

    def remove(self) -> None:
        """Stop showing failures: each is passed on, as other libraries may wrap this class."""
        self._is_on = False

    def _show(
        self,
        exc_tuple: tuple[type[BaseException], BaseException, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kind, error, _ = exc_tuple or sys.exc_info()
        if not self._is_on or not isinstance(error, RankFailure | CellSyntaxError):
            assert self._before is not None
            self._before(exc_tuple, *args, **kwargs)
            return
        self._shell._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if isinstance(error, CellSyntaxError):
            kind = SyntaxError
            lines = self._shell.SyntaxTB.structured_traceback(kind, error, None)
        else:
            lines = error._render_traceback_()
        type(self._shell)._showtraceback(self._shell, kind, error, lines)


_NO_MAGIC = re.compile(r"agic (?:function )?`(%+)(\w+)` not found")


def propose_magic(result: ExecutionResult) -> None:
    """Print the most similar magic of cellmesh below IPython's error for an unknown magic."""
    error = result.error_in_exec
    found = _NO_MAGIC.search(str(error)) if isinstance(error, UsageError) else None
    near = difflib.get_close_matches(found[2], COMMANDS, 1, 0.75) if found is not None else []
    if found is not None and near:
        mark = "%%" if near[0] in CELL_MAGICS else found[1]
        print(f"did you mean `{mark}{near[0]}`?", file=sys.stderr)


def load(shell: InteractiveShell, tells: bool = True) -> Commands:
    """Register the extension in an IPython shell, with the mesh and state of an earlier load; a
    second call has no effect.

    Args:
        shell: the shell.
        tells: whether to print which meshes there are.

    Returns:
        The magics.
    """
    extension: Extension | None = getattr(shell, "cellmesh", None)
    if extension is None:
        extension = shell.cellmesh = Extension(shell)  # type: ignore[attr-defined]
    if not extension.is_registered:
        extension.register()
        if tells:
            extension.commands.tell()
    return extension.commands


def unload(shell: InteractiveShell) -> None:
    """Remove the extension from an IPython shell; its mesh keeps running for a later load."""
    extension: Extension | None = getattr(shell, "cellmesh", None)
    if extension is not None and extension.is_registered:
        extension.unregister()
