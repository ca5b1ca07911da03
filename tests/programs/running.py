"""A program as the cells of a notebook, with a failure in the middle of a step, exported, and as a
script.

A program is a file of `scripts/`, in the form of a well-known one: it calls what that one calls, in
the same order. It leaves `losses` and, where it has any, `parameters` on each rank. Lines ``# %%``
part it into cells; what follows there are options of ``%%dist``, or ``steps``: the cell that a
failure strikes, and that is run again after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.exactness.comparing import Losses, difference
from tests.exactness.launching import EXACT, Job
from tests.mesh.test_kernel import Notebook, plain

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = "steps"


@dataclass(frozen=True)
class Program:
    """How a program is run."""

    name: str  # of its file
    # Where the failure strikes, of `FAULTS`; "" if the test cannot reach into its processes.
    fault: str = "backward"
    # At which call of that kind, for each run of the cell that fails, one after the other.
    counts: tuple[int, ...] = (2,)
    rank: int = 1  # on which it strikes
    num_ranks: int = 2
    argv: tuple[str, ...] = ()
    # It says itself where its ranks meet, as each is started by hand; with 1, it starts them.
    by_hand: int = 0
    # A cell that runs before ``steps``, which the program as a script has no need of.
    prepare: str = ""
    # It is run whole, as ``%run``, by its `argv`.
    is_whole: bool = False

    def __str__(self) -> str:
        return " ".join((self.name, *self.argv))

    @property
    def script(self) -> Path:
        """Its file."""
        return SCRIPTS / f"{self.name}.py"

    def cells(self) -> list[tuple[str, str]]:
        """Of each cell what stands in its ``# %%`` line, and its text."""
        if self.is_whole:
            return [(STEPS, f"%run {self.script} {' '.join(self.argv)}")]
        first, *others = re.split(r"(?m)^# %%(.*)\n", self.script.read_text())
        return [
            ("", first),
            *((mark.strip(), text) for mark, text in zip(others[::2], others[1::2], strict=True)),
        ]


# Run on a rank: the next call, by number, of a kind is struck: it raises, waits for ever in Python,
# or ends the process.
FAULTS = """
def fail():
    raise RuntimeError("injected")

def hold():
    import threading
    print("held")
    threading.Event().wait()

def die():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

def strike_forward(count, strike=fail):
    import torch.nn.modules.module as module
    def hook(*_):
        nonlocal count
        count -= 1
        if count == 0:
            handle.remove()
            strike()
    handle = module.register_module_forward_hook(hook)

def strike_backward(count, strike=fail):
    import torch, torch.nn.modules.module as module
    def hook(module, args, output):
        nonlocal count
        is_in_graph = isinstance(output, torch.Tensor) and output.requires_grad
        count -= is_in_graph
        if is_in_graph and count == 0:
            handle.remove()
            output.register_hook(lambda grad: strike())
    handle = module.register_module_forward_hook(hook)

def strike_between(count, strike=fail):
    import torch
    backward = torch.Tensor.backward
    def strike_once(*args, **kwargs):
        nonlocal count
        count -= 1
        if count == 0:
            torch.Tensor.backward = backward
            strike()
        return backward(*args, **kwargs)
    torch.Tensor.backward = strike_once
"""


def run_as_cells(
    program: Program, notebook: Notebook, folder: Path, is_disturbed: bool = False
) -> Losses:
    """Run a program's cells on fresh ranks in a folder, struck by its failures or not."""
    folder.mkdir()
    begin(notebook, f"%dist_restart\nimport os\nmesh.run(os.chdir, {str(folder)!r})\n{FAULTS}")
    for mark, text in program.cells():
        options = mark if mark != STEPS else ""
        if program.argv:
            options += f" --argv '{' '.join(program.argv)}'"
        cell = f"%%dist {options}\n{text}"
        for count in program.counts if mark == STEPS and is_disturbed else ():
            begin(notebook, f"mesh[{program.rank}].run(strike_{program.fault}, {count})")
            outcome = notebook.run(cell)
            assert outcome.status == "error", "the failure did not strike"
            assert "injected" in json.dumps(outcome.messages), outcome.errors()
        begin(notebook, cell)
    return results_of(notebook)


def results_of(notebook: Notebook) -> Losses:
    """Return what each rank of a notebook's mesh has computed."""
    begin(notebook, f"%dist_pull {EXACT} --all --as exact")
    said = begin(notebook, "import json\nprint(json.dumps(dict(exact)))")
    return {
        int(rank): [float.fromhex(each) for each in numbers]
        for rank, numbers in json.loads(said).items()
    }


def begin(notebook: Notebook, cell: str) -> str:
    """Run a cell that is to succeed; what it printed."""
    outcome = notebook.run(cell)
    assert outcome.status == "ok", "\n".join(
        [
            cell[:200],
            *(plain(error["evalue"]) for error in outcome.errors()),
            outcome.text(),
            outcome.text("stderr"),
        ]
    )
    return outcome.text()


def job_of(program: Program, folder: Path) -> Job:
    """Return the job that runs a program as a script in a folder."""
    return Job(
        str(program.script),
        str(folder),
        program.by_hand or program.num_ranks,
        program.argv,
        has_store=not program.by_hand,
        in_folder=True,
    )


def check(
    program: Program, notebook: Notebook, launch: Callable[[Job], Losses], where: Path
) -> None:
    """Run a program in all ways, and compare what it computes on every rank."""
    by_cells = run_as_cells(program, notebook, where / "cells")
    exported = where / "exported.py"
    said = begin(notebook, f"%dist_export {exported}")
    assert "left out" not in said, said
    assert "cellmesh" not in exported.read_text()

    def launched(job: Job) -> Losses:
        Path(job.folder).mkdir()
        return launch(job)

    def against(name: str, others: Losses) -> str:
        ours = {rank: by_cells[rank] for rank in others}
        return difference("as cells", ours, name, others)

    differences = [against("as a script", launched(job_of(program, where / "script")))]
    job = Job(str(exported), str(where / "exported"), program.num_ranks, in_folder=True)
    differences.append(against("as the exported script", launched(job)))
    if program.fault:
        disturbed = run_as_cells(program, notebook, where / "disturbed", is_disturbed=True)
        differences.append(against("after a failure", disturbed))
    assert any(by_cells.values()), "the program left no losses"
    assert not any(differences), "\n".join(filter(None, differences))


# Of each module that imports this and has `PROGRAMS` (see conftest).
def test_program(
    program: Program,
    notebook_of: Callable[[int], Notebook],
    launch: Callable[[Job], Losses],
    tmp_path: Path,
) -> None:
    check(program, notebook_of(program.num_ranks), launch, tmp_path)
