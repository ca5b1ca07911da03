"""The magics themselves: each reads its line, calls the mesh, shows what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ..controller.mesh import Mesh, Ranks
from ..controller.options import did_you_mean, parse_coordinate, parse_mesh
from ..controller.run import Run
from ..controller.session import Progress
from ..controller.sinks import Sink, current_sink
from ..controller.source import CellSyntaxError
from ..controller.starting import start
from ..errors import MeshUsageError, NoMeshError, RankFailure
from ..wire.ranks import parse_ranks
from .auto import AUTO_MAGIC, magics_inside, make_transformer
from .options import describe, parse, wants_help
from .tables import Table, facts_table, status_table


class Extension:
    """The magics of one shell, and the mesh that they act on.

    Args:
        shell: where they are registered.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.mesh: Mesh | None = None
        self._auto = False
        self._transformer = make_transformer(lambda: self._auto)

    # ---- the magics

    def dist_start(self, options: dict[str, Any]) -> None:
        if self.mesh is not None and self.mesh.alive:
            raise MeshUsageError(
                f"{self.mesh!r} is running: `%dist_restart` renews its ranks, `%dist_stop` ends it"
            )
        if self.mesh is not None:
            self.dist_stop({})  # one that has died
        sink = current_sink()
        chosen = {key: value for key, value in options.items() if value is not None}
        self.mesh = start(chosen.pop("num_ranks", None), on_progress=_progress_shower(sink), **chosen)
        sink.status(self._describe_mesh(), True)
        if "mesh" not in self._shell.user_ns:
            self._shell.user_ns["mesh"] = self.mesh

    def dist(self, options: dict[str, Any], source: str, line: str = "%%dist") -> Run[Any] | None:
        # The magic's own line counts as line 1 in the notebook: keep its place.
        if not source.lstrip().startswith("%%"):
            source = f"# {line}\n{source}"
        run = self._choose(options).submit_cell(
            source, execution_count=self._execution_count(), quiet=options["quiet"]
        )
        if options["nowait"]:
            return run
        run.result()
        return None

    def auto_cell(self, source: str) -> None:
        inside = magics_inside(source)
        if inside:
            raise MeshUsageError(
                f"{inside[0]} talks to the mesh from the notebook: put it in a cell of its own"
            )
        self._need_mesh().submit_cell(source, execution_count=self._execution_count()).result()

    def dist_auto(self, options: dict[str, Any]) -> None:
        self._auto = options["switch"] == "on"
        print(
            "cells run on the ranks from here; %%local runs one here, %dist_auto off ends it"
            if self._auto
            else "cells run in the notebook's process from here; %%dist runs one on the ranks"
        )

    def local(self, source: str) -> None:
        auto, self._auto = self._auto, False
        try:
            result = self._shell.run_cell(source, store_history=False)  # type: ignore[no-untyped-call]
            result.raise_error()
        finally:
            self._auto = auto

    def dist_mesh(self, options: dict[str, Any]) -> None:
        mesh = self._need_mesh()
        if options["dims"]:
            mesh.reshape(parse_mesh(" ".join(options["dims"])))
        print(" ".join(f"{name}={size}" for name, size in mesh.dims.items()))

    def dist_push(self, options: dict[str, Any]) -> None:
        ranks = self._choose(options)
        namespace = self._shell.user_ns
        for name in options["names"]:
            if name not in namespace:
                known = [key for key in namespace if not key.startswith("_")]
                raise MeshUsageError(f"the notebook has no name {name!r}{did_you_mean(name, known)}")
        ranks.push(**{name: namespace[name] for name in options["names"]})

    def dist_pull(self, options: dict[str, Any]) -> Any:
        mesh = self._need_mesh()
        expression = " ".join(options["expression"])
        if options["all"] and options["rank"] is not None:
            raise MeshUsageError("%dist_pull: --rank and --all exclude each other")
        rank = options["rank"] or 0
        if not 0 <= rank < len(mesh):
            raise MeshUsageError(f"there is no rank {rank}: the mesh has {len(mesh)}, 0-{len(mesh) - 1}")
        value = mesh.pull(expression) if options["all"] else mesh[rank].pull(expression)
        target = options["target"] or (expression if expression.isidentifier() else "")
        if not target:
            return value
        if not target.isidentifier():
            raise MeshUsageError(f"--as {target!r} is no name")
        self._shell.user_ns[target] = value
        return None

    def dist_inspect(self, options: dict[str, Any]) -> Table:
        expression = " ".join(options["expression"])
        return facts_table(expression, self._choose(options).inspect(expression))

    def dist_status(self, options: dict[str, Any]) -> Table:
        mesh = self._need_mesh()
        return status_table(repr(mesh), mesh.report(), mesh.states())

    def dist_logs(self, options: dict[str, Any]) -> None:
        mesh = self._need_mesh()
        for rank in parse_ranks(options["ranks"] or "all", len(mesh)):
            log = mesh.read_log(rank)
            if log is None:
                raise NoMeshError("the mesh has ended, and its logs with it")
            lines = log.text.splitlines()
            print(
                f"---- rank {rank}: last {min(options['lines'], len(lines))} lines of {mesh.log_path(rank)}"
            )
            print("\n".join(lines[-options["lines"] :]))

    def dist_interrupt(self, options: dict[str, Any]) -> None:
        self._choose(options).interrupt()

    def dist_restart(self, options: dict[str, Any]) -> None:
        mesh = self._need_mesh()
        sink = current_sink()
        mesh.restart(on_progress=_progress_shower(sink))
        sink.status(self._describe_mesh(), True)

    def dist_stop(self, options: dict[str, Any]) -> None:
        if self.mesh is None:
            raise _no_mesh()
        self.mesh.stop()
        if self._shell.user_ns.get("mesh") is self.mesh:
            del self._shell.user_ns["mesh"]
        self.mesh = None

    # ---- registration

    def register(self) -> None:
        """Register the magics, auto mode's transformer, and how our errors look."""
        for name in (
            "dist_start", "dist_auto", "dist_mesh", "dist_push", "dist_pull", "dist_inspect", "dist_status",
            "dist_logs", "dist_interrupt", "dist_restart", "dist_stop",
        ):  # fmt: skip
            self._register(name, "line", self._line_magic(name, getattr(self, name)))
        self._register("dist", "line_cell", self._dist_magic)
        self._register("local", "cell", lambda line, cell: self.local(_only(parse("local", line), cell)))
        self._register(AUTO_MAGIC, "cell", lambda line, cell: self.auto_cell(cell))
        self._shell.input_transformers_cleanup.append(self._transformer)
        # IPython prints exception groups whole, frames of ours and all, unless told otherwise.
        self._shell.set_custom_exc((RankFailure, CellSyntaxError), _show_failure)  # type: ignore[no-untyped-call]

    def unregister(self) -> None:
        """Undo `register`, and stop the mesh."""
        if self.mesh is not None:
            self.mesh.stop()
            self.mesh = None
        self._shell.input_transformers_cleanup.remove(self._transformer)
        self._shell.set_custom_exc((), None)  # type: ignore[no-untyped-call]
        for kind in self._shell.magics_manager.magics.values():
            for name in [name for name, function in kind.items() if getattr(function, "cellmesh", False)]:
                del kind[name]

    def _register(self, name: str, kind: str, function: Callable[..., Any]) -> None:
        def magic(*args: str) -> Any:
            return function(*args)

        magic.__doc__ = describe(name, kind != "line") if name != AUTO_MAGIC else "(auto mode)"
        magic.cellmesh = True  # type: ignore[attr-defined]
        self._shell.register_magic_function(magic, kind, name)  # type: ignore[arg-type]

    def _line_magic(self, name: str, method: Callable[[dict[str, Any]], Any]) -> Callable[[str], Any]:
        def run(line: str) -> Any:
            if wants_help(line):
                print(describe(name, False))
                return None
            return method(parse(name, line))

        return run

    def _dist_magic(self, line: str, cell: str | None = None) -> Any:
        if wants_help(line):
            print(describe("dist", True))
            return None
        options = parse("dist", line)
        if cell is None:
            raise MeshUsageError("%dist runs a whole cell: write %%dist on its first line")
        return self.dist(options, cell, f"%%dist {line}".strip())

    # ---- inside

    def _need_mesh(self) -> Mesh:
        if self.mesh is None:
            raise _no_mesh()
        return self.mesh

    def _choose(self, options: dict[str, Any]) -> Ranks:
        mesh = self._need_mesh()
        chosen: Ranks = mesh
        if options.get("ranks"):
            chosen = mesh[parse_ranks(options["ranks"], len(mesh))]
        if options.get("at"):
            chosen = chosen.at(**parse_coordinate(options["at"]))
        return chosen

    def _execution_count(self) -> int:
        """The ``In[n]`` of the cell that runs. Some versions of IPython count up before it, some after."""
        count = int(self._shell.execution_count)
        history = self._shell.history_manager
        stored = len(history.input_hist_parsed) - 1 if history is not None else count
        return stored if stored == count - 1 else count

    def _describe_mesh(self) -> str:
        mesh = self._need_mesh()
        infos = mesh.ready_ranks
        backends = sorted({info.backend for info in infos})
        devices = sorted({info.device.partition(":")[0] for info in infos})
        dims = ", ".join(f"{name}={size}" for name, size in mesh.dims.items())
        return (
            f"{len(mesh)} ranks ready in {mesh.start_s:.1f} s: {', '.join(backends)} on "
            f"{', '.join(devices)}, mesh {dims}"
        )


def _progress_shower(sink: Sink) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        count = f" {progress.num_ready}/{progress.num_ranks}" if progress.num_ready else ""
        sink.status(f"starting: {progress.stage}{count} ({progress.elapsed_s:.1f} s)", False)

    return show


def _only(options: dict[str, Any], cell: str) -> str:
    return cell


def _no_mesh() -> NoMeshError:
    return NoMeshError("no mesh is running: start one with `%dist_start 4`")


def _show_failure(
    shell: InteractiveShell,
    kind: type,
    error: RankFailure | CellSyntaxError,
    tb: Any,
    tb_offset: int | None = None,
) -> list[str]:
    if isinstance(error, CellSyntaxError):
        kind = SyntaxError
        lines = shell.SyntaxTB.structured_traceback(kind, error, None)
    else:
        lines = error._render_traceback_()
    shell._showtraceback(kind, error, lines)
    return lines


def load(shell: InteractiveShell) -> None:
    """Register the magics in a shell; loading twice changes nothing."""
    if getattr(shell, "cellmesh", None) is None:
        extension = Extension(shell)
        extension.register()
        shell.cellmesh = extension  # type: ignore[attr-defined]


def unload(shell: InteractiveShell) -> None:
    """Undo `load`."""
    extension: Extension | None = getattr(shell, "cellmesh", None)
    if extension is not None:
        extension.unregister()
        shell.cellmesh = None  # type: ignore[attr-defined]
