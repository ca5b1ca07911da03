"""The IPython shell of a rank: runs cells, and sends their displays as messages.

It is made in the zygote, before any fork, so that ranks inherit it initialized; `RankShell.connect`
connects it to the rank's own output.
"""

from __future__ import annotations

import io
import linecache
import marshal
import os
import runpy
import sys
import traceback
import types
import warnings
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.autocall import ExitAutocall
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magics import osm
from traitlets import Any as AnyTrait
from traitlets import Type
from traitlets.config import Config

from ...errors import CellmeshError
from ...wire import payload
from ..static_lookup import plain_traceback, text_of, traceback_of
from .child_processes import status_of
from .imports import load
from .stack_inspection import Place, is_machinery, lines_of, place_of
from .streams import CELL, RankDisplayHook, RankDisplayPublisher, Show
from .tracebacks import (
    RankCompiler,
    format_without_own_frames,
    make_renderer,
    name_cells_in_warnings,
    with_all_frames,
    with_few_frames,
)


class RankExit(ExitAutocall):
    """Ends the cell when user code calls ``exit()`` or ``quit()``, as ``sys.exit()`` does."""

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


class RankShell(InteractiveShell):
    """The InteractiveShell of a rank, which has no terminal."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)
    compiler_class = Type(RankCompiler)
    compile: RankCompiler
    show: Show = AnyTrait()  # type: ignore[assignment]
    ask: Callable[..., str] = AnyTrait()  # type: ignore[assignment]
    # Errors that IPython has shown as tracebacks while the cell runs, with which the cell fails.
    # None between cells.
    _shown: list[BaseException] | None = None
    report_numbers: Callable[[float | None, Mapping[str, Any]], None] = AnyTrait()  # type: ignore[assignment]
    call_at_heal: Callable[[Callable[[], object]], None] = AnyTrait()  # type: ignore[assignment]
    find_group: Callable[[str], Any] = AnyTrait()  # type: ignore[assignment]
    stopped_by: Callable[[], type[KeyboardInterrupt] | None] = AnyTrait(lambda: None)  # type: ignore[assignment]

    @property
    def debugger_cls(self) -> Any:
        try:
            return load("rank.debugger").RankPdb
        except CellmeshError:
            return super().debugger_cls

    def connect(self, show: Show) -> None:
        """Connect the shell to the rank's output streams, after the fork.

        The objects that IPython sets up for each cell and removes after it (``get_ipython`` and
        ``display`` among the builtins, `sys.displayhook`) stay set up, as a rank runs only cells.
        """
        self.show = show
        self.builtin_trap.auto_builtins.update(exit=self.exiter, quit=self.exiter)
        # Entered, not only set: IPython would exit the context after each cell that it runs.
        self.builtin_trap.__enter__()
        self.display_trap.__enter__()

    def use_loop(self, run: Callable[[Any], Any]) -> None:
        """Execute asynchronous cells by `run`, unless the user chooses another runner."""
        self.loop_runner = run
        self.loop_runner_map = {**self.loop_runner_map, "asyncio": (run, True)}

    def system(self, cmd: str) -> None:
        """Run ``!command``; interrupting it ends not only the command but also its cell.

        In IPython an interrupt ends only the command, and the next line runs.
        """
        self.system_piped(cmd)  # type: ignore[no-untyped-call]
        self._stop_here()

    def getoutput(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command of ``lines = !command`` and return its output; interrupting it ends the
        cell, too.
        """
        output = super().getoutput(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._stop_here()
        return output

    def _stop_here(self) -> None:
        kind = self.stopped_by()
        if kind is not None:
            raise kind

    def init_io(self) -> None: ...

    def enable_gui(self, gui: Any = None) -> None: ...

    def _exiter_default(self) -> ExitAutocall:
        return RankExit(self)  # type: ignore[no-untyped-call]

    def raw_input(self, prompt: str = "") -> str:
        return self.ask(prompt)

    def debugger(self, force: bool = False) -> None:  # %debug
        if force or self.call_pdb:
            load("rank.debugger").post_mortem()

    def safe_execfile(self, fname: Any, *where: Any, exit_ignore: bool = False, **_: Any) -> None:
        """Run a file for ``%run``; an exception in it fails the cell, like one in a called
        function.
        """
        try:
            execute_file(os.path.abspath(fname), where[0])
        except SystemExit as error:
            if status_of(error) != 0 and not exit_ignore:
                raise

    def safe_run_module(self, mod_name: Any, where: dict[str, Any]) -> None:
        """Run a module for ``%run -m``; an exception in it fails the cell, like one in a called
        function.
        """
        try:
            where.update(runpy.run_module(str(mod_name), run_name="__main__", alter_sys=True))
        except SystemExit as error:
            if status_of(error) != 0:
                raise

    def run_cell(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run source code as a cell inside the current cell, for ``%%capture`` and
        ``get_ipython().run_cell``.

        The caller gets the result and continues, but an interrupt or exit ends the outer cell, too.
        """
        result: ExecutionResult = super().run_cell(*args, **kwargs)  # type: ignore[no-untyped-call]
        if (error := _error_of(result)) is not None:
            if not issubclass(type(error), Exception):
                raise error
            self._note_shown(error)
        return result

    # IPython calls this for errors of user code. The cell's own exception is in its result.
    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        if running_compiled_code or exception_only:
            return
        _, value, _ = self._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if exc_tuple is None and sys.exc_info()[1] is None:  # %tb shows an earlier exception
            self._print_traceback(value)
        else:
            self._note_shown(value)

    def _note_shown(self, error: BaseException) -> None:
        """Record an error that IPython shows, so that the running cell fails with it at its end;
        print it if no cell runs.
        """
        if self._shown is None:
            self._print_traceback(error)
        elif not any(error is each for each in self._shown):
            self._shown.append(error)

    def _print_traceback(self, error: BaseException) -> None:
        print(self.show_traceback(error), file=sys.stderr)

    def showsyntaxerror(
        self, filename: str | None = None, running_compiled_code: bool = False
    ) -> None: ...

    def showindentationerror(self) -> None: ...

    def run_source(
        self,
        source: str,
        transformed: str = "",
        code: bytes = b"",
        execution_count: int = 0,
        quiet: bool = False,
    ) -> BaseException | None:
        """Run a cell; return the exception that it raised, or None.

        Args:
            source: source as typed, including magics.
            transformed: source as Python; "" to transform it here.
            code: compiled parts of `transformed` (`RunCell`); b"" to compile it here.
            execution_count: the notebook's ``In[n]``.
            quiet: whether to drop the value of a last expression.
        """
        # As `self.execution_count = execution_count`, without the checks of a trait (eight calls).
        self._trait_values["execution_count"] = execution_count
        CELL.set((source, quiet))
        shown: list[BaseException] = []
        self._shown = shown
        if not code or not self._is_plain():
            error = _error_of(super().run_cell(transformed or source, store_history=False))  # type: ignore[no-untyped-call]
            sys.settrace(None)
        else:
            error = self._run_plainly(transformed, code)
        self._shown = None
        if shown:
            if error is None or (issubclass(type(error), SystemExit) and status_of(error) == 0):
                error = shown[0]
            for each in shown:
                if each is not error:
                    self._print_traceback(each)
        if error is not None:
            if issubclass(type(error), SystemExit) and status_of(error) == 0:
                return None
            remember_error(error)
            kind = type(error)
            # The user has turned `%pdb` on.
            if self.call_pdb and issubclass(kind, Exception) and not issubclass(kind, BdbQuit):
                try:
                    load("rank.debugger").post_mortem()
                except BaseException as instead:
                    return instead
        return error

    async def run_source_async(
        self, source: str, transformed: str, execution_count: int, quiet: bool
    ) -> None:
        """Run a cell that awaits, beside others, and raise its exception; as `run_source`."""
        self._trait_values["execution_count"] = execution_count
        CELL.set((source, quiet))
        result = await super().run_cell_async(
            transformed, transformed_cell=transformed, store_history=False
        )
        self.events.trigger("post_execute")
        error = _error_of(result)
        if error is not None and not (isinstance(error, SystemExit) and status_of(error) == 0):
            remember_error(error)
            raise error

    def _is_plain(self) -> bool:
        """Return whether IPython has no callbacks or settings that observe or change cells (as
        ``%autoreload`` does), nor future statements of earlier cells.
        """
        # Like attributes of `self`, of which each would cost two calls.
        callbacks, traits = self.events.callbacks, self._trait_values
        return not (
            callbacks["pre_run_cell"]
            or callbacks["post_run_cell"]
            or traits["ast_transformers"]
            or traits["ast_node_interactivity"] != "last_expr"
            or not self.compile.is_plain()
        )

    def _run_plainly(self, transformed: str, code: bytes) -> BaseException | None:
        """Run a cell as IPython's `run_cell_async` does, without steps that are needed only if
        callbacks observe or change cells.

        Between two cells a rank's CPU caches go cold, and IPython's way then costs six times as
        much.
        """
        parts = marshal.loads(code)
        self.compile.keep(parts[0].co_filename, transformed, self.execution_count)
        self.events.trigger("pre_execute")
        try:
            for part in parts:
                exec(part, self.user_ns)
        except BaseException as error:
            return error
        finally:
            sys.settrace(None)
            self.events.trigger("post_execute")
        return None

    def init_traceback_handlers(self, custom_exceptions: Any) -> None:
        super().init_traceback_handlers(custom_exceptions)
        self.InteractiveTB = make_renderer(self.InteractiveTB)

    def render_traceback(self, error: BaseException) -> tuple[str, str]:
        """Render an exception's traceback as a notebook does, with ANSI colours and without frames
        of cellmesh.

        Returns:
            The traceback with one line for each run of frames of libraries (with all frames under
            ``%xmode Verbose``), and the traceback with all frames.
        """
        text = self._render(error)
        whole = with_all_frames(text)
        return (whole if self.InteractiveTB.mode == "Verbose" else with_few_frames(text)), whole

    def show_traceback(self, error: BaseException) -> str:
        """Return an exception's traceback with libraries' frames shortened, or in the form set by
        ``%xmode``.
        """
        return self.render_traceback(error)[0]

    def _render(self, error: BaseException) -> str:
        kind, tb = type(error), skip_machinery(traceback_of(error))
        if issubclass(kind, UsageError):
            return f"UsageError: {error}"
        if issubclass(kind, SystemExit):
            return "\n".join((f"SystemExit: {text_of(error)}", *getattr(error, "__notes__", ())))
        if issubclass(kind, BdbQuit):
            return "BdbQuit: the debugger was left"
        try:
            if issubclass(kind, SyntaxError) and tb is None:
                return self.InteractiveTB.stb2text(
                    self.SyntaxTB.structured_traceback(kind, error, None)
                )
            # IPython takes seconds to render a thousand frames.
            if (
                not issubclass(kind, BaseExceptionGroup)
                and len([*traceback.walk_tb(tb)]) <= _MAX_RENDERED_FRAMES
            ):
                lines = self.InteractiveTB.structured_traceback(kind, error, tb, tb_offset=0)
                return str(self.InteractiveTB.stb2text(lines))
        except Exception:
            pass  # render it as Python does
        except BaseException:  # the exception's own code has raised
            return plain_traceback(error, tb)
        finally:
            _forget_syntax_trees()
        try:
            return format_without_own_frames(traceback.TracebackException(kind, error, tb))
        except BaseException:  # or a group is nested too deeply
            return plain_traceback(error, tb)

    def place_of(self, tb: types.TracebackType | None) -> Place:
        """Return the position in the notebook's cells at which an exception was raised, from its
        traceback.
        """
        return place_of(lines_of(tb), self)

    def cell_of(self, filename: str) -> int:
        """Return n of the cell ``In[n]`` with this code file name, 0 if none has it."""
        return int(self.compile._filename_map.get(filename, 0)) or payload.cell_of(filename)


def execute_file(path: str, names: dict[str, Any]) -> None:
    """Execute a Python file, given by its absolute path, in a namespace."""
    linecache.checkcache(path)  # it may have been edited since a traceback quoted it
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), names)


_MAX_RENDERED_FRAMES = 100


def remember_error(error: BaseException | None) -> None:
    """Store the exception that a cell or call has raised in `sys.last_exc`, for `post_mortem`; None
    clears it.
    """
    if issubclass(type(error), BdbQuit):
        return
    sys.last_type = None if error is None else type(error)
    sys.last_value = sys.last_exc = error  # type: ignore[attr-defined]
    sys.last_traceback = None if error is None else traceback_of(error)


def _forget_syntax_trees() -> None:
    """Drop the syntax trees of a cell (11 kB), which the libraries with which IPython renders
    tracebacks would keep forever.

    Their entries for files are kept: they are few, and parsing a file of torch takes long.
    """
    for module in ("executing.executing", "stack_data.core"):
        kind: Any = getattr(sys.modules.get(module), "Source", type)
        for name in ("__source_cache_with_lines", "__executing_cache"):
            cache = vars(kind).get(name, {})
            for key in list(cache):
                lines = linecache.cache.get(getattr(key[0], "co_filename", key[0]))
                # Entries whose source is in no file.
                if lines is not None and (len(lines) == 1 or lines[1] is None):
                    del cache[key]
        for owner, name in (
            (kind, "statements_at_line"),
            (sys.modules.get(module), "statement_containing_node"),
        ):
            getattr(getattr(owner, name, None), "cache_clear", int)()


def skip_machinery(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that starts at its first frame of user code."""
    while tb is not None and (
        is_machinery(tb.tb_frame) or tb.tb_frame.f_code.co_filename == "<frozen runpy>"
    ):
        tb = tb.tb_next
    return tb


def _error_of(result: ExecutionResult) -> BaseException | None:
    return result.error_before_exec or result.error_in_exec


def _print_or_raise(*values: Any, **options: Any) -> None:
    """Print for IPython's directory magics, but raise an error: ``%cd`` would only print it."""
    if values and issubclass(type(values[0]), OSError):
        raise values[0]
    print(*values, **options)


def make_shell() -> RankShell:
    """Make the IPython shell of this process, without starting threads or opening files."""
    config = Config()
    config.HistoryManager.enabled = False
    warnings.filterwarnings("ignore", message="To exit: use")
    user_module = types.ModuleType("__main__", doc="The namespace of a rank.")
    shell = RankShell.instance(config=config, user_module=user_module)
    shell.connect(lambda kind, bundle, display_id: None)
    name_cells_in_warnings(shell.cell_of)
    vars(osm)["print"] = _print_or_raise
    for prompt in (
        "ps1",
        "ps2",
        "ps3",
    ):  # IPython sets them; libraries refuse multi-process training where ps1 exists
        vars(sys).pop(prompt, None)
    shell.run_source("pass")  # sets traits that a first cell sets, which `_is_plain` reads
    return shell
