"""A program, and the failures that strike it in the middle of a step.

A program is a file of `scripts/`, in the form of a well-known one: it calls what that one calls, in
the same order. It leaves `losses` and, where it has any, `parameters` on each rank. Lines ``# %%``
part it into cells; ``# %% steps`` begins the one that a failure strikes, and that is run again
after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.exactness.launching import Job

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = "steps"


@dataclass(frozen=True)
class Program:
    """How a program is run."""

    name: str  # of its file
    fault: str = "backward"  # where the failure strikes, of `FAULTS`
    count: int = 2  # at which call of that kind
    rank: int = 1  # on which it strikes
    num_ranks: int = 2
    argv: tuple[str, ...] = ()
    is_whole: bool = False  # it is run whole, as ``%run``, by its `argv`

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
        parts = re.split(r"(?m)^# %%(.*)\n", f"# %%\n{self.script.read_text()}")
        marks, texts = parts[1::2], parts[2::2]
        return [(mark.strip(), text) for mark, text in zip(marks, texts, strict=True)]


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
"""


def job_of(program: Program, folder: Path, exported: Path | None = None) -> Job:
    """Return the job that runs a program, or the script exported of it, in a new folder."""
    folder.mkdir()
    script, argv = (exported, ()) if exported else (program.script, program.argv)
    return Job(str(script), str(folder), program.num_ranks, argv, in_folder=True)
