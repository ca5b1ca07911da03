"""Exported scripts, run with a stand-in for the process group."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.checkpoint import FileSystemReader

from cellmesh.errors import MeshUsageError
from cellmesh.magics.export.recording import (
    Aside,
    Beginning,
    Checkpoint,
    Entry,
    PageHistory,
    Push,
    RankCell,
    Reshape,
    Seed,
    value_of,
)
from cellmesh.magics.export.rewriting import MAIN
from cellmesh.magics.export.script import Draft, export, write_script


class Ended:
    """A run that has ended, or not."""

    def __init__(self, *failed: int, is_done: bool = True) -> None:
        self.failed, self.is_done = list(failed), is_done

    def done(self) -> bool:
        return self.is_done

    def failed_ranks(self) -> list[int]:
        return self.failed


def history_of(*cells: Entry | str, dims: dict[str, int] | None = None) -> PageHistory:
    """A history with a cell for each entry; text is a cell of the notebook's own process."""
    history = PageHistory()
    history.begin(Beginning(dims or {"dp": 4}, "gloo", 1))
    for count, cell in enumerate(cells, 2):
        if isinstance(cell, str):
            history.close(count, cell, failed=False)
        else:
            history.add(count, cell)
            history.close(
                count,
                f"%%dist\n{cell.source}" if isinstance(cell, RankCell) else "%dist_...",
                False,
            )
    return history


def ran(source: str, *ranks: int) -> RankCell:
    return RankCell(source, ranks or None)


def script_of(*cells: Entry | str) -> Draft:
    script = write_script(history_of(*cells), "train.py")
    compile(script.text, "train.py", "exec")
    return script


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What scripts do to their process group."""
    done: list[str] = []
    threads = torch.get_num_threads()
    monkeypatch.setattr(dist, "init_process_group", lambda backend: done.append(f"init {backend}"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    monkeypatch.setattr(
        device_mesh,
        "init_device_mesh",
        lambda kind, shape, mesh_dim_names: done.append(f"{shape} {mesh_dim_names}"),
    )
    yield done
    torch.set_num_threads(threads)


def run(
    script: Draft, monkeypatch: pytest.MonkeyPatch, rank: int = 0
) -> tuple[dict[str, Any], str]:
    """The names that a script leaves on a rank, and what it prints."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script.text, "train.py", "exec", dont_inherit=True), names)
    return names, printed.getvalue()


def test_a_rank_has_what_cells_find(monkeypatch: pytest.MonkeyPatch, group: list[str]) -> None:
    script = script_of(
        ran("x = rank, local_rank, world_size, device.type\nthreads = torch.get_num_threads()\n")
    )
    names, _ = run(script, monkeypatch, rank=3)
    assert names["x"] == (3, 3, 4, "cuda" if torch.cuda.is_available() else "cpu")
    assert names["threads"] == 1
    assert group[1:] == ["(4,) ('dp',)", "destroy"]
    assert 'torchrun --nproc-per-node 4 train.py\n"""' in script.text
    assert "# In [2]\nx = rank, local_rank" in script.text
    assert "cellmesh" not in script.text
    assert "def show" not in script.text


READ = "import sys; {} = sys.argv[1:]\n"
STEP = ran("x += 1\nx\n")
SOME = (ran("x = 0\n"), ran('x = """a\n  b"""\n', 0, 2, 3), ran("y = 1\n", 1))
NAMES_RANK = (ran("for rank in range(4): pass\n"), ran("x = 1\nx\n", 2))
PRINTING = (ran("rank + 1\n"), ran("None\n"), ran("world_size;\n"), RankCell("7\n", quiet=True))
VALUES = {
    "lr": 0.1,
    "path": "a'b\n",
    "dims": {"a": [1, (2,), None], "b": {3}},
    "none": set(),
    "flag": True,
}
PUSH = Push({name: value_of(value) for name, value in VALUES.items()})


@pytest.mark.parametrize(
    ("cells", "rank", "bound", "printed", "texts"),
    [
        ([RankCell(READ.format("x"), argv=("--lr", "a 'b'")), ran(READ.format("y"))], 0,
         {"x": ["--lr", "a 'b'"], "y": []}, "", ()),
        (SOME, 2, {"x": "a\n  b", "y": None}, "", ["if rank in (0, 2, 3):\n"]),
        (SOME, 1, {"x": 0, "y": 1}, "", ["if rank == 1:\n    y = 1\n"]),
        (NAMES_RANK, 2, {"x": 1}, "[2] 1\n", ()),
        (PRINTING, 2, {}, "[2] 3\n", ()),
        ([ran("x = 0\n"), STEP, STEP, STEP, ran("y = x\n"), STEP], 0, {"x": 4, "y": 3},
         "[0] 1\n[0] 2\n[0] 3\n[0] 4\n",
         ["# In [3] to In [5]\nfor _ in range(3):\n    x += 1\n"]),
        ([PUSH], 0, VALUES, "", ()),
        ([ran("import sys\ndef main(): sys.exit()\n"), ran("main()\n"), ran("x = 1\n")], 0,
         {"x": 1}, "", ()),
        ([ran("how = 'spawn'\ndef f(): ...\n"), ran("f()\n")], 0, {"how": "spawn"}, "",
         ["\nhow = 'spawn'\n", f"{MAIN}:\n    show(f())\n", f"{MAIN}:\n    if torch.cuda."]),
    ],
    ids=["argv", "rank 2 of some", "rank 1 of some", "own rank",
         "values shown", "repeated", "pushed", "exits", "spawns"],
)  # fmt: skip
def test_a_script_does_what_the_cells_did(
    cells: Any, rank: int, bound: Any, printed: str, texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: int(os.environ["RANK"]))
    script = script_of(*cells)
    names, said = run(script, monkeypatch, rank)
    assert {name: names.get(name) for name in bound} == bound
    assert said == printed
    assert all(text in script.text for text in texts)
    assert script.num_cells == sum(isinstance(cell, RankCell) for cell in cells)


def test_failed_and_unfinished_cells_become_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(
        ran("x = 1\n"),
        RankCell("x = 2\nraise ValueError\n", run=Ended(1, 3)),
        RankCell("x = 3\n", run=Ended(is_done=False)),
        RankCell("y = 4\n", run=Ended()),
    )
    names, _ = run(script, monkeypatch)
    assert (names["x"], names["y"]) == (1, 4)
    assert (script.num_cells, script.left_out) == (2, [3, 4])
    assert "# In [3] failed on ranks 1,3 and is left out:\n#     x = 2\n#     raise" in script.text
    assert "# In [4] has not ended and is left out:\n#     x = 3\n" in script.text


@pytest.mark.parametrize(
    "source",
    [
        "import cellmesh as cm\nfor i in range(3): cm.log(loss=i, step=i)\nx = 1\n",
        "def f():\n    from cellmesh import log as tell\n    tell(ä='ü')\n    return 1\nx = f()\n",
    ],
)
def test_logging_for_plots_needs_no_cellmesh(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sys.modules["cellmesh"]
    monkeypatch.setitem(sys.modules, "cellmesh", real)
    script = script_of(ran(source))
    assert source in script.text
    assert run(script, monkeypatch)[0]["x"] == 1
    assert sys.modules["cellmesh"] is not real
    assert "sys.modules" not in script_of(ran("import cellmesh.errors, cellmesh\n")).text


def test_values_that_must_be_supplied(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, long = torch.ones(2, 3), list(range(1000))
    script = script_of(
        Push({"batch": value_of(batch), "long": value_of(long), "n": value_of(1)}, (0,))
    )
    assert "# batch = ...  # supply it: Tensor of shape (2, 3) torch.float32\n" in script.text
    assert "if rank == 0:\n    n = 1\n" in script.text
    assert [warning.partition(":")[0] for warning in script.warnings] == [
        "In [2] pushed `batch`, a Tensor of shape (2, 3) torch.float32",
        "In [2] pushed `long`, a list of length 1000",
    ]


def test_a_reshaped_mesh_and_a_cell_that_raises(
    monkeypatch: pytest.MonkeyPatch, group: list[str]
) -> None:
    reshape = Reshape({"pp": 2, "dp": 1, "tp": 2})
    history = history_of(reshape, ran("1 / 0\n"), dims={"dp": 2, "tp": 2})
    with pytest.raises(ZeroDivisionError):
        run(write_script(history, "x.py"), monkeypatch)
    assert group[1:] == ["(2, 2) ('dp', 'tp')", "(2, 1, 2) ('pp', 'dp', 'tp')"]


def test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = "import random\nx = torch.rand(1).item(), random.random()\n"
    script = script_of(Seed(3, per_rank=False), ran(draw))
    assert run(script, monkeypatch)[0]["x"] == run(script, monkeypatch, rank=1)[0]["x"]
    assert "numpy" not in script.text
    script = script_of(
        Seed(3, per_rank=True), ran(f"{draw}import numpy as np\ny = np.random.rand()\n")
    )
    first, second = run(script, monkeypatch)[0], run(script, monkeypatch, rank=1)[0]
    assert first["x"] != second["x"]
    assert first["y"] != second["y"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("given", [("opt", "model", "losses", "ones", "schedule"), ()])
def test_checkpoints(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # DCP asks as well
    names = ("model", "opt", "schedule", "losses", "ones")
    path = str(tmp_path / "latest")
    script = script_of(
        ran("model, losses = torch.nn.Linear(2, 2), [0.5]\n"),
        ran("opt = torch.optim.Adam(model.parameters())\n"),
        ran("schedule = torch.optim.lr_scheduler.StepLR(opt, 1)\nones = torch.ones(2)\n"),
        ran("wrapped = torch.nn.Sequential(model)\n"),
        ran("model(ones).sum().backward()\nopt.step()\nopt.zero_grad()\n"),
        ran("before = model.weight.tolist()\n"),
        Checkpoint("save", names, path),
        ran("torch.nn.init.zeros_(model.weight)\nlosses, same = [], ones.zero_()\n"),
        ran("schedule.step()\nfor state in opt.state.values(): state['step'].zero_()\n"),
        Checkpoint("load", given, path),
        ran("after, steps = model.weight.tolist(), [s['step'].item() for s in opt.state.values()]"),
    )
    bound, _ = run(script, monkeypatch, rank=1)
    assert bound["after"] == bound["before"]
    assert (bound["losses"], bound["steps"]) == ([0.5], [1, 1])
    assert bound["same"].tolist() == [1, 1]
    assert bound["schedule"].last_epoch == 0
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"model@1.weight", "opt@1.state.weight.step", "losses@1", "ones@1"} <= keys.keys()


def test_the_notebooks_own_cells_are_comments() -> None:
    script = script_of(
        "import json\n\n%dist_push x\n",
        "%dist_status\n",
        "%%local\ny = 1\n",
        "%load_ext cellmesh\n%dist_auto on\n",
    )
    own = "# In [2] ran in the notebook's own process:\n#     import json\n#\n#     %dist_push x\n"
    assert own in script.text
    assert "# In [3] is left out: %dist_status\n" in script.text
    assert "process:\n#     y = 1\n" in script.text
    assert "In [5]" not in script.text
    assert script.num_cells == 0
    assert not script.left_out


def test_parts_impossible_in_a_script_are_reported() -> None:
    script = script_of(
        Aside("%dist_sync model", changes=True),
        ran("%timeit 1\n"),
        Aside("%dist_status"),
        ran("x = await f()\n"),
    )
    assert script.left_out == [5]
    assert script.warnings == [
        "In [2]: a script has nothing like `%dist_sync model`",
        "In [3]: a script cannot do `%timeit 1`",
        "In [5] cannot stand in a script: it awaits at top level: call asyncio.run in the cell",
    ]


def test_new_ranks_start_with_an_empty_history() -> None:
    history = history_of(ran("x = 1\n"), "import json\n")
    history.begin(Beginning({"dp": 2}, "gloo", 1, attached=True))
    history.close(4, "%dist_restart", failed=False)
    history.add(5, ran("y = 1\n"))
    text = write_script(history, "x.py").text
    assert "x = 1" not in text
    assert "import json" in text
    assert "y = 1" in text


def test_actors_of_the_notebook_are_named(tmp_path: Path) -> None:
    history = history_of(ran("trainer.step()\n"), ran("mine = 1\nmine.bit_length()\n"))
    said = export(history, tmp_path / "train.py", False, ("trainer", "mine", "other"))
    (line,) = [line for line in said.splitlines() if " is an actor " in line]
    assert line.startswith("- `trainer` is an actor that the notebook has made")


def test_a_file_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    history = history_of(ran("x = 1\n"), RankCell("y\n", failed=(0,)))
    said = export(history, path, overwrite=False)
    command = f"`torchrun --nproc-per-node 4 {path}`"
    assert said == f"{path}: 1 cell, 1 left out (In [3]); run it with {command}"
    with pytest.raises(MeshUsageError, match="--force"):
        export(history, path, overwrite=False)
    export(history, path, overwrite=True)
    with pytest.raises(MeshUsageError, match="nothing to export"):
        export(PageHistory(), path, overwrite=True)
