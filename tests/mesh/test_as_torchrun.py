"""What a program written for torchrun finds on a rank: its arguments, and no sign that it may not
run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError

ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument('--lr', default='none')
lr = parser.parse_args().lr
"""


def test_a_program_parses_the_arguments_of_its_cell_and_no_others(mesh: cm.Mesh) -> None:
    for argv, lr in ((None, "none"), ("--lr 0.1", "0.1"), ("--lr 'a b'", "a b"), ("", "none")):
        mesh.cell(ARGUMENTS, argv=argv)
        assert mesh.pull("lr").list == [lr] * 4
    mesh.cell(ARGUMENTS, argv=["--lr", "a b"])
    assert mesh.pull("lr, __import__('sys').argv").list == [("a b", ["cell"])] * 4
    with pytest.raises(cm.RankFailure) as caught:
        mesh.cell(f"{ARGUMENTS}parser.error('--data is missing')")
    assert '`%%dist --argv "--lr 0.1"` gives a cell arguments' in caught.value.tracebacks[0]


@pytest.mark.parametrize("ending", ["raise ValueError", "del sys.argv"])
def test_arguments_end_with_their_cell_however_it_ends(mesh: cm.Mesh, ending: str) -> None:
    # What a cell sets stays, as all that it leaves.
    mesh.cell("import sys; sys.argv = ['own.py', '--mine']")
    with contextlib.suppress(cm.RankFailure):
        mesh.cell(ending, argv="--lr 1")
    assert mesh.pull("sys.argv").list == [["own.py", "--mine"]] * 4
    mesh.cell("sys.argv = ['cell']")


def test_invalid_arguments_are_refused(mesh: cm.Mesh) -> None:
    for argv, said in (
        ("--lr '", "No closing quotation"),
        (3, "cannot be read"),
    ):
        with pytest.raises(MeshUsageError, match=said):
            mesh.cell("pass", argv=argv)  # type: ignore[arg-type]


def test_program_reads_no_command_line_of_the_zygote(mesh: cm.Mesh) -> None:
    def read() -> dict[str, object]:
        import __main__

        return {
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "file": getattr(__main__, "__file__", None),
            "command": Path("/proc/self/cmdline").read_text(),
            "psutil": psutil.Process().cmdline(),
            "child": os.popen("tr '\\0' ' ' </proc/$PPID/cmdline").read(),
        }

    for rank, found in mesh.run(read).items():
        command = [f"cellmesh-r{rank}", mesh.name]
        assert found == {
            "argv": ["cell"],
            "orig_argv": [sys.executable, "cell"],
            "file": None,
            "command": " ".join(command) + "\0",
            "psutil": command,
            "child": " ".join(command) + " ",
        }


# Each as the library asks it: whether it trains with several processes, and how it shows things.
ASKED = {
    # Lightning and Fabric: an interactive environment.
    "hasattr(sys, 'ps1') or bool(sys.flags.interactive)": False,
    # transformers, wandb, tqdm.auto, huggingface_hub, rich: a notebook.
    "'IPKernelApp' in get_ipython().config": False,
    "'ipykernel.zmqshell' in sys.modules": False,
    "any(each.__name__ == 'ZMQInteractiveShell' for each in type(get_ipython()).__mro__)": False,
    # multiprocessing: the main module to run again; asyncio.run refuses.
    "hasattr(__import__('__main__'), '__file__')": False,
    "__import__('asyncio')._get_running_loop() is not None": False,
    "sys.__stdin__.isatty()": False,
    # matplotlib, display, %magics: IPython is there.
    "'IPython' in sys.modules and __IPYTHON__": True,
    "get_ipython() is not None": True,
}


def test_signs_of_a_notebook_are_those_that_help(mesh: cm.Mesh) -> None:
    mesh.cell("import sys")
    assert {question: set(mesh.pull(question).list) for question in ASKED} == {
        question: {answer} for question, answer in ASKED.items()
    }


def test_ranks_draw_as_processes_of_their_own(mesh: cm.Mesh) -> None:
    def seed() -> int:
        import torch

        return torch.initial_seed()

    fixed = 67280421310721  # in older versions of torch, of each process
    command = [sys.executable, "-c", "import torch; print(torch.initial_seed())"]
    own = int(subprocess.check_output(command))
    seeds = mesh.run(seed).list
    assert set(seeds) == {fixed} if own == fixed else len(set(seeds)) == len(seeds) > 1
