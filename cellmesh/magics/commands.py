"""Implements the magics: each reads its options, calls the mesh, and shows the result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.display import display

from ..controller.core.effects import describe_healing
from ..controller.mesh import Mesh
from ..controller.meshes import Meshes, own_meshes
from ..controller.news import Reply
from ..controller.output.calling_cell import current_sink, is_executed
from ..controller.ranks import Ranks, seed_ranks
from ..controller.resizing import describe_resize
from ..controller.run import Run
from ..controller.session.alike import (
    check_same,
    describe_kept,
    describe_ready,
    name_of_same,
    settle_left,
)
from ..controller.session.attach import attach, stop_mesh
from ..controller.session.life import show_progress
from ..controller.session.living import advise_left, find_living, left_meshes
from ..controller.session.start import start
from ..controller.status import show_log
from ..controller.trace.profile import Profiling
from ..errors import CellmeshError, MeshUsageError, NoMeshError, did_you_mean
from ..wire.mesh_dims import parse_coordinate, parse_mesh
from ..wire.ranks import describe_ranks, parse_ranks
from .auto import CellForRanks, magics_inside, read_cell, read_help
from .completion import show_help
from .export.recording import Recorder
from .export.script import export
from .options import Given, chosen, parse, unquote
from .render.profiles import describe_timings, show_profile, show_timeline
from .render.tables import Table, actors_table, join_tables, memory_table, status_table

# Maximum wait of a cell for the end of a recovery, which takes a fraction of a second.
_RECOVERY_S = 3.0


class Commands:
    """The magics of one IPython shell, and the meshes that they act on.

    Args:
        shell: shell of the notebook.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._used: list[Mesh] = []  # the meshes of the magics; the one in use is last
        self.is_auto = False
        self._auto: Given = {}  # the options of auto mode
        self.recorder = Recorder(shell)
        # A cell that has ended before its recovery, and the reply with the recovery's note.
        self._late: tuple[int | None, Reply[str | None]] | None = None

    # ---- start and end of a mesh

    def dist_start(self, options: Given) -> None:
        given = chosen(options)
        is_fresh = given.pop("fresh", False)
        held = [mesh.name for mesh in self._used if mesh.alive]
        same = name_of_same(given, held) if held else ""
        old = [mesh for mesh in self._used if mesh.name == same or not mesh.alive]
        if same and not is_fresh:
            mesh = self.meshes[same]
            mesh.fold_numbers = check_same(mesh.rank_set.session, given).fold_numbers
            self.keep(mesh)
            return
        sink = current_sink()
        settle_left(given, is_fresh, lambda text: sink.status(text, True))
        for mesh in old:
            mesh.stop()
            self._drop(mesh)
        mesh = start(given.pop("num_ranks", None), on_progress=show_progress(sink), **given)
        self.adopt(mesh)
        sink.status(f"{describe_ready(mesh)}{self._beside()}", True)

    def dist_attach(self, options: Given) -> None:
        name, held = options["name"], list(self.meshes)
        if name is None and self.mesh is not None and self.mesh.alive:
            others = [mesh.name for mesh in find_living(asks=False) if mesh.name not in held]
            name = None if others else self.mesh.name
        if name in held:
            raise MeshUsageError(f"{name} is attached: `%dist_detach` leaves it")
        sink = current_sink()
        mesh = attach(name, steal=options["steal"])
        self.adopt(mesh)
        found = "".join(f"; {each}" for each in (*mesh.runs, *mesh.actors.values()))
        sink.status(f"attached to {mesh}{found}{self._beside()}", True)

    def dist_detach(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        name = mesh.name
        mesh.detach()
        self._drop(mesh)
        print(f"{name} lives on: `%dist_attach {name}` finds it again{self._next()}")

    def dist_use(self, options: Given) -> None:
        mesh = self.meshes[options["name"]]
        self.adopt(mesh)
        print(f"{mesh}{self._beside(is_named=True)}")

    def dist(self, options: Given, source: str, line: str) -> Run[Any] | None:
        typed, mesh, count = source, self._need_mesh(options), self.execution_count()
        timed = options["timed"]
        if self._help(source, self._choose(options)):
            return None
        if timed and options["nowait"]:
            raise MeshUsageError("%%dist: --time and --nowait exclude each other")
        if not source.lstrip().startswith("%%"):
            source = f"{_head('dist', line)}{source}"
        quiet = options["quiet"]
        run = self._choose(options).submit_cell(
            source,
            execution_count=count,
            quiet=quiet,
            timed=timed,
            argv=options["argv"],
            has_tabs=True,
            in_order=not options["nowait"],
        )
        self.recorder.cell(count, typed, run, quiet, mesh, options["argv"])
        if options["nowait"]:
            return run
        try:
            run.result()
        finally:
            if timed and run.timings():
                print(describe_timings(run.timings()))
        return None

    def dist_profile(self, options: Given, source: str, line: str) -> None:
        mesh, count = self._need_mesh(options), self.execution_count()
        trace, argv = options["trace"], options["argv"]
        source_of_ranks = f"{_head('dist_profile', line)}{source}"
        profiling = Profiling(self._choose(options), source_of_ranks, trace, count, argv)
        self.recorder.cell(count, source, profiling.run, False, mesh, argv)
        try:
            profiling.run.result()
        finally:
            if profiling.run.done():
                display(show_profile(profiling.collect(), options["num_rows"]))  # type: ignore[no-untyped-call]

    def auto_cell(self, source: str) -> None:
        inside = magics_inside(source)
        if inside:
            raise MeshUsageError(
                f"{inside[0]} talks to the mesh from the notebook: put it in a cell of its own"
            )
        ranks, count = self.auto_ranks(), self.execution_count()
        if self._help(source, ranks):
            return
        run = ranks.submit_cell(source, execution_count=count, has_tabs=True, in_order=True)
        self.recorder.cell(count, source, run, False, self._need_mesh(self._auto))
        run.result()

    def dist_auto(self, options: Given) -> None:
        on = options.get("on")
        where = f"the ranks of {on}" if on else "the ranks"
        if options["ranks"] or options["at"]:
            where = describe_ranks(self._choose(options).ranks)
        self.is_auto, self._auto = options["switch"] == "on", options
        print(
            f"cells run on {where} from here; %%local runs one here, %dist_auto off ends it"
            if self.is_auto
            else "cells run in the notebook's process from here; %%dist runs one on the ranks"
        )

    def local(self, options: Given, source: str, line: str) -> None:
        auto, self.is_auto = self.is_auto, False
        try:
            result = self._shell.run_cell(source, store_history=False)  # type: ignore[no-untyped-call]
            result.raise_error()
        finally:
            self.is_auto = auto

    def dist_mesh(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        if options["dims"]:
            mesh.reshape(parse_mesh(" ".join(options["dims"])))
        print(" ".join(f"{name}={size}" for name, size in mesh.dims.items()))

    def dist_push(self, options: Given) -> None:
        ranks = self._choose(options)
        namespace = self._shell.user_ns
        for name in options["names"]:
            if name not in namespace:
                known = [key for key in namespace if not key.startswith("_")]
                raise MeshUsageError(
                    f"the notebook has no name {name!r}{did_you_mean(name, known)}"
                )
        ranks.push(
            {name: namespace[name] for name in options["names"]},
            shard=options["shard"],
            placements=options["placements"],
        )

    def dist_pull(self, options: Given) -> Any:
        mesh = self._need_mesh(options)
        expression = " ".join(options["expression"])
        if options["all"] and options["rank"] is not None:
            raise MeshUsageError("%dist_pull: --rank and --all exclude each other")
        rank = options["rank"] or 0
        if not 0 <= rank < len(mesh):
            raise MeshUsageError(
                f"there is no rank {rank}: the mesh has {len(mesh)}, 0-{len(mesh) - 1}"
            )
        if options["gather"] or options["reduce"]:
            if options["all"] or options["rank"] is not None:
                raise MeshUsageError(
                    "%dist_pull: --gather and --reduce take all ranks: no --rank or --all"
                )
            value = mesh.pull(
                expression, gather=options["gather"], reduce=options["reduce"], dim=options["dim"]
            )
        else:
            value = mesh.pull(expression) if options["all"] else mesh[rank].pull(expression)
        target = options["target"] or (expression if expression.isidentifier() else "")
        if not target:
            return value
        if not target.isidentifier():
            raise MeshUsageError(f"--as {target!r} is no name")
        self._shell.user_ns[target] = value
        return None

    def dist_seed(self, options: Given) -> None:
        seed, per_rank = options["seed"], options["per_rank"]
        seed_ranks(self._need_mesh(options), seed, per_rank)
        print(f"seeded random, numpy, torch with {seed}{' + rank' if per_rank else ''}")

    def dist_reload(self, options: Given) -> None:
        names = sorted({name for mesh in self._each(options) for name in mesh.reload()})
        print(f"reloaded {', '.join(names)}" if names else "no module has changed")

    def dist_export(self, options: Given) -> None:
        path = Path(options["path"]).expanduser()
        in_use = self.mesh.name if self.mesh is not None else ""
        name = options["on"] or in_use
        actors = [actor for mesh in self._used if mesh.name == name for actor in mesh.actors]
        print(export(self.recorder.choose(options["on"], in_use), path, options["force"], actors))

    def dist_inspect(self, options: Given) -> None:
        from .views.inspector.inspector import show_inspection

        ranks = self._choose(options)
        found = ranks.inspect(" ".join(options["expression"]), grads=options["grads"])
        show_inspection(ranks.rank_set, found, options["watch"])

    def dist_who(self, options: Given) -> Table:
        from .render.inspections import names_table

        return names_table(self._choose(options), options["pattern"] or "*")

    def dist_timeline(self, options: Given) -> Any:
        return show_timeline(self._choose(options), options["num_cells"], options["trace"])

    def dist_plot(self, options: Given) -> Any:
        return self._choose(options).plot(*options["names"], mean=options["mean"])

    def dist_status(self, options: Given) -> Any:
        mesh = self._need_mesh(options)
        if options["live"]:
            from .views.dashboard.dashboard import show_dashboard

            return show_dashboard(mesh)
        tables = {}
        for each in self._each(options):
            table = status_table(repr(each), each.report(), each.states())
            more = each.rank_set.session.describe_transitions() if options["debug"] else []
            tables[each.name] = dataclasses.replace(table, notes=[*table.notes, *more])
        return tables[mesh.name] if len(tables) == 1 else join_tables(tables, mesh.name)

    def dist_actors(self, options: Given) -> Table:
        mesh, tables = self._need_mesh(options), {}
        for each in self._each(options):
            actors = each.rank_set.session.actors
            states = each.states() if actors else {}
            tables[each.name] = actors_table(repr(each), actors, each.runs, states)
        return tables[mesh.name] if len(tables) == 1 else join_tables(tables, mesh.name)

    def dist_mem(self, options: Given) -> Table:
        ranks = self._choose(options)
        infos = [info for info in self._need_mesh(options).report() if info.rank in ranks.ranks]
        return memory_table("", infos, ranks.states())

    def dist_logs(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        for rank in parse_ranks(options["ranks"] or "all", len(mesh)):
            print(show_log(mesh.rank_set.session, rank, options["lines"]))

    def dist_interrupt(self, options: Given) -> None:
        self._choose(options).interrupt()

    def dist_heal(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        print(describe_healing(mesh.heal(options["source"], hosts=options["hosts"] or ())))

    def dist_resize(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        before = len(mesh)
        report = mesh.resize(
            options["num_ranks"], hosts=options["hosts"] or (), mesh=options["mesh"]
        )
        print(describe_resize(report, before, mesh.dims))

    def dist_stacks(self, options: Given) -> None:
        ranks = self._choose(options)
        print(ranks.stacks(all_threads=options["all_threads"]))

    def dist_why(self, options: Given) -> None:
        print(self._need_mesh(options).why())

    def dist_check(self, options: Given) -> Any:
        return self._choose(options).check(" ".join(options["expression"]))

    def dist_sync(self, options: Given) -> Any:
        expression = " ".join(options["expression"])
        return self._need_mesh(options).sync(expression, source=options["source"])

    def dist_save(self, options: Given) -> None:
        *names, path = options["names"]
        if not names:
            raise MeshUsageError(
                "name what to save, and where: `%dist_save model optimizer runs/latest`"
            )
        self._need_mesh(options).save(*names, path=unquote(path))
        print(f"saved {', '.join(names)}")

    def dist_load(self, options: Given) -> None:
        *names, path = options["names"]
        print(f"loaded {', '.join(self._choose(options).load(*names, path=unquote(path)))}")

    def dist_debug(self, options: Given) -> None:
        ranks = options["ranks_argument"] or options["ranks"]
        self._choose({"ranks": ranks, "on": options["on"]}).debug()

    def dist_restart(self, options: Given) -> None:
        mesh = self._need_mesh(options)
        sink = current_sink()
        taken = mesh.restart(on_progress=show_progress(sink))
        sink.status(describe_ready(mesh), True)
        if taken:
            sink.note(taken)

    def dist_stop(self, options: Given) -> None:
        name = options["name"]
        if name and name not in self.meshes:
            stop_mesh(name)
            print(f"{name} has ended")
            return
        mesh = self._need_mesh({"on": name or options["on"]})
        mesh.stop()
        self._drop(mesh)
        if after := self._next():
            print(f"{mesh.name} has ended{after}")

    def tell(self) -> None:
        """Print that the running mesh is kept, else which meshes this notebook has left running."""
        if self.mesh is not None and self.mesh.alive:
            self.keep(self.mesh)
            return
        for mesh in left_meshes(asks=False):
            current_sink().status(advise_left(mesh), True)

    def keep(self, mesh: Mesh) -> None:
        """Print that a running mesh is kept as it is and in use, and assign it to its variable if
        the user has deleted that.
        """
        self.adopt(mesh)
        current_sink().status(f"{describe_kept(mesh)}{self._beside()}", True)

    def await_recovery(self, result: ExecutionResult) -> None:
        """Wait, at the end of a cell, until a recovery that the cell has caused is over.

        The notes on the recovery then belong to the cell's output: a program that executes a
        notebook reads no later output. The note on a longer recovery is also shown at the end of
        the first cell that ends after it.
        """
        for mesh in self.meshes.values():
            with contextlib.suppress(CellmeshError, KeyboardInterrupt):
                recovery = mesh.rank_set.session.recovery()
                if recovery is not None and not recovery.wait(_RECOVERY_S):
                    self._late = self._late or (result.execution_count, recovery)
        if self._late is not None and self._late[1].is_given():
            (count, recovery), self._late = self._late, None
            if is_executed() and (text := recovery.result()):
                current_sink().note(f"after In[{count}] had ended: {text}")

    def read_cell(self, code: str) -> tuple[CellForRanks, Ranks] | None:
        """Return the source of a cell being typed that ranks would run, and these ranks; None if
        the cell would not run on ranks.
        """
        cell = read_cell(code, self.is_auto)
        if cell is None or not self.meshes:
            return None
        try:
            return cell, self._choose(
                parse(cell.magic, cell.line)
            ) if cell.magic else self.auto_ranks()
        except MeshUsageError:  # the line of options is not complete yet
            return (cell, self.mesh) if self.mesh is not None else None

    def auto_ranks(self) -> Ranks:
        """Return the ranks on which auto mode runs cells."""
        return self._choose(self._auto)

    # ---- helpers

    def _help(self, source: str, ranks: Ranks) -> bool:
        """Show help if a cell for ranks only requests help (``x?``); return whether it did."""
        asked = read_help(source)
        if asked is None:
            return False
        show_help(self._shell, ranks, *asked)
        return True

    @property
    def mesh(self) -> Mesh | None:
        """The mesh in use: the one that magics act on if their line names no other."""
        return self._used[-1] if self._used else None

    @property
    def meshes(self) -> Meshes:
        """The living meshes of this notebook, also those that code has started."""
        return own_meshes()

    def adopt(self, mesh: Mesh) -> None:
        """Use this mesh in magics, and assign it to ``mesh`` unless the user has another object
        there.
        """
        namespace = self._shell.user_ns
        if "mesh" not in namespace or any(namespace["mesh"] is each for each in self._used):
            namespace["mesh"] = mesh
        self._used = [each for each in self._used if each is not mesh] + [mesh]

    def _drop(self, mesh: Mesh) -> None:
        """Use the mesh that was used before, after the end of one."""
        used = [each for each in self._used if each is not mesh]
        if self._shell.user_ns.get("mesh") is mesh:
            del self._shell.user_ns["mesh"]
        self._used = [each for each in used if not each.rank_set.session.ending]
        if self.mesh is not None:
            self.adopt(self.mesh)

    def _beside(self, is_named: bool = False) -> str:
        """Return a clause on the mesh in use, which may have been named before, if there are
        others.
        """
        if self.mesh is None or len(self.meshes) < 2:
            return ""
        others = ", ".join(name for name in self.meshes if name != self.mesh.name)
        return f"; {'' if is_named else f'{self.mesh.name} is '}in use, beside {others}"

    def _next(self) -> str:
        """Return a clause on the mesh in use after the end of one."""
        return f"; {self.mesh.name} is in use" if self.mesh is not None else ""

    def _each(self, options: Given) -> list[Mesh]:
        """Return the mesh that a magic's line names, else all of this notebook; the one in use is
        first.
        """
        mesh = self._need_mesh(options)
        others = () if options["on"] else self.meshes.values()
        return [mesh, *(each for each in others if each is not mesh)]

    def mesh_of(self, options: Given) -> Mesh | None:
        """Return the mesh that a magic's line names, else the one in use; None if there is none."""
        return self.meshes.get(options["on"]) if options.get("on") else self.mesh

    def mesh_names(self, line: str) -> list[str]:
        """Return the names of meshes that may stand at the end of a magic's line."""
        magic = line.split()[0].lstrip("%")
        is_on = " --on" in line or magic not in ("dist_attach", "dist_stop")
        left = [] if is_on else [mesh.name for mesh in left_meshes(asks=False)]
        return left if magic == "dist_attach" else [*self.meshes, *left]

    def _need_mesh(self, options: Given) -> Mesh:
        if options.get("on"):
            return self.meshes[options["on"]]
        if self.mesh is None:
            raise _no_mesh(self.meshes)
        return self.mesh

    def _choose(self, options: Given) -> Ranks:
        mesh = self._need_mesh(options)
        chosen: Ranks = mesh
        if options.get("ranks"):
            chosen = mesh[parse_ranks(options["ranks"], len(mesh))]
        if options.get("at"):
            chosen = chosen.at(**parse_coordinate(options["at"]))
        return chosen

    def execution_count(self) -> int:
        """Return the ``In[n]`` of the running cell; some versions of IPython count it before the
        cell, some after.
        """
        count = int(self._shell.execution_count)
        history = self._shell.history_manager
        stored = len(history.input_hist_parsed) - 1 if history is not None else count
        return stored if stored == count - 1 else count


def _head(name: str, line: str) -> str:
    """Return the magic's line as a comment, so that line numbers of a cell for ranks are those of
    the notebook's cell.
    """
    return f"# %%{name} {line}".strip() + "\n"


def _no_mesh(others: Collection[str]) -> NoMeshError:
    if others:
        one = next(iter(others))
        return NoMeshError(f"no mesh is in use: `%dist_use {one}` or --on {one}")
    return NoMeshError(
        "no mesh is running: start one with `%dist_start 4`, or find one that lives on with "
        "`%dist_attach`"
    )
