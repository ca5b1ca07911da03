"""The IPython extension: registers the magics of `commands.Commands` in a shell, and shows
cellmesh's objects as widgets.
"""

from __future__ import annotations

import difflib
import functools
import re
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
from .completion.hooks import CellCompletion
from .options import CELL_MAGICS, COMMANDS, describe, parse, wants_help

_MESH = ("cellmesh.controller.mesh", "Mesh")


class MagicDisplays:
    """Draws cellmesh's objects in one shell; imports a widget's module when it is first needed."""

    def __init__(self) -> None:
        self._renderers: dict[tuple[str, str], Callable[[Any], None]] = {
            ("cellmesh.controller.metrics", "Plot"): _show_plot,
            ("cellmesh.controller.inspect", "Inspection"): _show_inspection,
        }

    def register(self, formatter: DisplayFormatter) -> None:
        """Make an IPython formatter show plots, inspections and meshes as widgets or HTML."""
        for (module, name), show in self._renderers.items():
            formatter.ipython_display_formatter.for_type_by_name(module, name, show)
        formatter.formatters["text/html"].for_type_by_name(*_MESH, _draw_mesh)

    def unregister(self, formatter: DisplayFormatter) -> None:
        """Remove from an IPython formatter the displays that `register` added."""
        own = dict.fromkeys(self._renderers, formatter.ipython_display_formatter)
        for (module, name), printers in {**own, _MESH: formatter.formatters["text/html"]}.items():
            printers.deferred_printers.pop((module, name), None)
            for kind in [
                kind
                for kind in printers.type_printers
                if (kind.__module__, kind.__name__) == (module, name)
            ]:
                printers.pop(kind)


def _draw_mesh(mesh: Any) -> str | None:
    """Return an HTML table of the state of each rank of a mesh; None if the mesh has ended."""
    from .render.tables import doing, mesh_table

    states = mesh.states() if mesh.alive else {}
    infos = sorted(mesh.report(), key=lambda info: info.rank) if mesh.alive else []
    words = [doing(info, states.get(info.rank)) for info in infos]
    return mesh_table(repr(mesh), mesh.dims, words)._repr_html_() if words else None


def _show_plot(plot: Any) -> None:
    from .widgets.plot.plot import LivePlot

    LivePlot(plot).view._ipython_display_()


def _show_inspection(inspection: Any) -> None:
    if inspection.ranks is not None:
        from .widgets.inspector.inspector import show_inspection

        show_inspection(inspection.ranks, inspection)
        return
    from .render.inspections import static_of

    static = static_of(inspection)
    display({"text/plain": static.text, "text/html": static.html}, raw=True)  # type: ignore[no-untyped-call]


_NO_MAGIC = re.compile(r"agic (?:function )?`(%+)(\w+)` not found")


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
        self._displays = MagicDisplays()
        self._transformer = make_transformer(lambda: self.commands.is_auto)
        self._completion = CellCompletion(
            shell, lambda: self.commands.mesh, self.commands.read_cell
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
        self._shell.events.register("post_run_cell", _propose_magic)
        self._completion.install()
        if self._shell.display_formatter is not None:
            self._displays.register(self._shell.display_formatter)
        self._failures.install()
        self.is_registered = True
        if self.commands.mesh is not None and self.commands.mesh.alive:
            self.commands.keep()
        else:
            self.commands.tell_left()

    def unregister(self) -> None:
        """Undo `register`. The mesh keeps running, for `register` after a ``%reload_ext``; the user
        is informed unless that follows in the same cell.
        """
        self.is_registered = False
        self._failures.remove()
        self._completion.remove()
        if self.commands.mesh is not None and self.commands.mesh.alive:
            self._shell.events.register("post_run_cell", self._tell_left)
        if self._shell.display_formatter is not None:
            self._displays.unregister(self._shell.display_formatter)
        self._shell.input_transformers_cleanup.remove(self._transformer)
        self._shell.events.unregister("post_run_cell", self.commands.recorder.close_cell)
        self._shell.events.unregister("post_run_cell", self.commands.await_recovery)
        self._shell.events.unregister("post_run_cell", _propose_magic)
        for kind in self._shell.magics_manager.magics.values():
            for name in [
                name for name, function in kind.items() if getattr(function, "cellmesh", False)
            ]:
                del kind[name]

    def _tell_left(self, result: object) -> None:
        """Print, at the end of the cell that unloads the extension, that the mesh still runs."""
        self._shell.events.unregister("post_run_cell", self._tell_left)
        mesh = self.commands.mesh
        if not self.is_registered and mesh is not None:
            print(
                f"{mesh.name} runs on: `%load_ext cellmesh` has its commands again, "
                "`mesh.stop()` ends it"
            )

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
        count, mesh = self.commands.execution_count(), self.commands.mesh
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
        self._before: Callable[..., None] | None = None  # set on the instance by another library
        self._is_on = False
        self._is_in_place = False

    def install(self) -> None:
        """Start to show failures."""
        self._is_on = True
        if not self._is_in_place:
            self._is_in_place = True
            self._before = vars(self._shell).get("showtraceback")
            self._shell.showtraceback = self._show  # type: ignore[method-assign]

    def remove(self) -> None:
        """Stop showing failures, and restore the shell's function unless another library has
        replaced it since.
        """
        self._is_on = False
        if vars(self._shell).get("showtraceback") == self._show:
            self._is_in_place = False
            if self._before is None:
                del self._shell.showtraceback
            else:
                self._shell.showtraceback = self._before  # type: ignore[method-assign]

    def _show(
        self,
        exc_tuple: tuple[type[BaseException], BaseException, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kind, error, _ = exc_tuple or sys.exc_info()
        if not self._is_on or not isinstance(error, RankFailure | CellSyntaxError):
            if self._before is None:
                type(self._shell).showtraceback(self._shell, exc_tuple, *args, **kwargs)
            else:
                self._before(exc_tuple, *args, **kwargs)
            return
        self._shell._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if isinstance(error, CellSyntaxError):
            kind = SyntaxError
            lines = self._shell.SyntaxTB.structured_traceback(kind, error, None)
        else:
            lines = error._render_traceback_()
        type(self._shell)._showtraceback(self._shell, kind, error, lines)


def _propose_magic(result: ExecutionResult) -> None:
    """Print the most similar magic of cellmesh below IPython's error for an unknown magic."""
    error = result.error_in_exec
    found = _NO_MAGIC.search(str(error)) if isinstance(error, UsageError) else None
    if found is None:
        return
    near = difflib.get_close_matches(found[2], COMMANDS, n=1, cutoff=0.75)
    if near:
        mark = found[1] if near[0] not in CELL_MAGICS else "%%"
        print(f"did you mean `{mark}{near[0]}`?", file=sys.stderr)


def load(shell: InteractiveShell) -> None:
    """Register the extension in an IPython shell, with the mesh and state of an earlier load; a
    second call has no effect.
    """
    extension: Extension | None = getattr(shell, "cellmesh", None)
    if extension is None:
        extension = shell.cellmesh = Extension(shell)  # type: ignore[attr-defined]
    if not extension.is_registered:
        extension.register()


def unload(shell: InteractiveShell) -> None:
    """Remove the extension from an IPython shell; its mesh keeps running for a later load."""
    extension: Extension | None = getattr(shell, "cellmesh", None)
    if extension is not None and extension.is_registered:
        extension.unregister()
