"""Writes what a notebook's magics do into its `PageHistory`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from ...controller.arguments import CellSyntaxError, read_argv
from ...controller.mesh import Mesh
from ...controller.mesh_dims import parse_mesh
from ...controller.run import Run
from ...errors import CellmeshError
from ...wire.ranks import parse_ranks
from ..auto import read_cell
from ..options import unquote
from .history import (
    Aside,
    Beginning,
    Checkpoint,
    Entry,
    Held,
    PageHistory,
    Push,
    RankCell,
    Reshape,
    Seed,
    value_of,
)


def look_at_checkpoint(mesh: Mesh, action: str, words: Sequence[str]) -> Checkpoint:
    """Return a record of a save or load that has ended; asks the ranks about its names.

    Args:
        mesh: who did it.
        action: "save" or "load".
        words: what the magic was given: names, and the path.
    """

    # A nested function travels as what it is: ranks import nothing of the notebook's.
    def look(names: list[str], path: str) -> list[tuple[str, str, str, str]]:
        """Return, on a rank, a value's name and kind, the model of an optimizer, and a digest of
        what may differ by rank.
        """
        import hashlib
        import pickle
        import sys

        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        namespace: dict[str, Any] = vars(sys.modules["__main__"])
        if not names:
            keys = FileSystemReader(path).read_metadata().state_dict_metadata
            names = list(dict.fromkeys(key.partition(".")[0].partition("@")[0] for key in keys))
        modules = {
            key: value for key, value in namespace.items() if isinstance(value, torch.nn.Module)
        }
        found = []
        for name in names:
            value = namespace[name]
            kind, model, digest = "value", "", ""
            if name in modules:
                kind = "model"
            elif isinstance(value, torch.optim.Optimizer):
                kind = "optimizer"
                wanted = {
                    id(parameter) for group in value.param_groups for parameter in group["params"]
                }
                owners = {
                    key: held
                    for key, module in modules.items()
                    if wanted <= (held := {id(parameter) for parameter in module.parameters()})
                }
                model = min(owners, key=lambda key: (key not in names, len(owners[key])))
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                kind = "stateful"
            else:
                kind = "tensor" if isinstance(value, torch.Tensor) else "value"
                if not hasattr(value, "device_mesh"):  # a DTensor says by itself what is where
                    digest = hashlib.blake2b(pickle.dumps(value)).hexdigest()
            found.append((name, kind, model, digest))
        return found

    *names, path = words
    told = mesh.run(look, names, unquote(path))
    items = []
    for rows in zip(*told.values(), strict=True):
        name, kind, model, _ = rows[0]
        items.append(Held(name, kind, model, by_rank=len({digest for *_, digest in rows}) > 1))
    done: Literal["save", "load"] = "save" if action == "save" else "load"
    return Checkpoint(done, tuple(items), unquote(path))


_BEGINNINGS = ("dist_start", "dist_restart", "dist_attach")
# What changes the ranks in a way that a script cannot repeat.
_CHANGES = ("dist_sync", "dist_heal", "dist_debug", "dist_interrupt", "dist_load")
# What a script need not know of.
_PASSED_OVER = ("dist_stop", "dist_detach", "dist_auto", "dist_export")


class Recorder:
    """Records in a `PageHistory` what the cells and magics of one notebook do.

    Args:
        shell: the notebook's.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.history = PageHistory()

    def cell(
        self,
        count: int,
        source: str,
        run: Run[Any],
        quiet: bool,
        mesh: Mesh,
        argv: str | None = None,
    ) -> None:
        """Record a cell that was sent to ranks as a run."""
        entry = RankCell(source, _unless_all(run.ranks, mesh), quiet, run, argv=read_argv(argv))
        self.history.add(count, entry)
        run.on_end(entry.settle)

    def magic(
        self, count: int, name: str, line: str, options: dict[str, Any], mesh: Mesh | None
    ) -> None:
        """Record a line magic that has ended."""
        if mesh is not None and name in _BEGINNINGS:
            self.history.begin(_beginning(mesh, attached=name == "dist_attach"))
        elif mesh is not None and name not in _PASSED_OVER:
            entry = self._entry(name, line, options, mesh)
            if entry is not None:
                self.history.add(count, entry)

    def close_cell(self, result: ExecutionResult | None) -> None:
        """Note that a cell of the notebook has ended, upon IPython's event."""
        info = result.info if result is not None else None
        if (
            result is None
            or info is None
            or not info.store_history
            or result.execution_count is None
        ):
            return  # one inside another, or a front end's own
        if isinstance(result.error_in_exec, CellSyntaxError):
            return  # no rank has run anything
        if _asks_for_help(info.raw_cell or ""):
            return
        self.history.close(result.execution_count, info.raw_cell or "", not result.success)

    def _entry(self, name: str, line: str, options: dict[str, Any], mesh: Mesh) -> Entry | None:
        match name:
            case "dist_push":
                namespace = self._shell.user_ns
                values = {each: value_of(namespace[each]) for each in options["names"]}
                ranks = parse_ranks(options["ranks"], len(mesh)) if options["ranks"] else mesh.ranks
                return Push(values, _unless_all(tuple(ranks), mesh))
            case "dist_mesh":
                return Reshape(parse_mesh(" ".join(options["dims"]))) if options["dims"] else None
            case "dist_seed":
                return Seed(options["seed"], options["per_rank"])
            case "dist_save" | "dist_load" if options.get("ranks") is None:
                try:
                    return look_at_checkpoint(mesh, name.removeprefix("dist_"), options["names"])
                except (
                    CellmeshError,
                    KeyboardInterrupt,
                ):  # it was done, and only the script will lack it
                    return Aside(f"%{name} {line}", changes=True)
        return Aside(f"%{name} {line}".strip(), name in _CHANGES)


def _asks_for_help(source: str) -> bool:
    """Return whether a cell only asks for help: ``x?``, ``?x``, ``%magic?``."""
    cell = read_cell(source, is_auto=False)
    lines = [line.strip() for line in (cell.source if cell is not None else source).splitlines()]
    told = [line for line in lines if line and not line.startswith("#")]
    return len(told) == 1 and (told[0].startswith("?") or told[0].endswith("?"))


def _unless_all(ranks: tuple[int, ...], mesh: Mesh) -> tuple[int, ...] | None:
    return None if set(ranks) == set(mesh.ranks) else ranks


def _beginning(mesh: Mesh, attached: bool) -> Beginning:
    backends = sorted({info.backend for info in mesh.ready_ranks or mesh.report() if info.backend})
    told = os.environ.get("OMP_NUM_THREADS", "")  # as `workers.processes.num_threads_for`
    default = 1 if len(mesh) > 1 else 0
    num_threads = int(told) if told.isdecimal() else default
    return Beginning(mesh.dims, backends[0] if backends else "gloo", num_threads, attached)
