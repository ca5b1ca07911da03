"""What a program written for torchrun finds on a rank: its arguments, and no sign that it may not
run.
"""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(
    ("argv", "lr"),
    [
        (None, "none"),
        ("--lr 0.1", "0.1"),
        ("", "none"),
        ("--lr 'a b'", "a b"),
        (["--lr", "a b"], "a b"),
    ],
)
def test_a_program_parses_the_arguments_of_its_cell_and_no_others(
    mesh: cm.Mesh, argv: str | list[str] | None, lr: str
) -> None:
    mesh.cell(ARGUMENTS, argv=argv)
    assert mesh.pull("lr").list == [lr] * 4
    assert mesh.pull("__import__('sys').argv").list == [["cell"]] * 4


@pytest.mark.parametrize("ending", ["raise ValueError", "sys.argv = None", "del sys.argv"])
def test_arguments_end_with_their_cell_however_it_ends(mesh: cm.Mesh, ending: str) -> None:
    # What a cell sets stays, as all that it leaves.
    mesh.cell("import sys; sys.argv = ['own.py', '--mine']")
    if ending.startswith("raise"):
        with pytest.raises(cm.RankFailure):
            mesh.cell(ending, argv="--lr 1")
    else:
        mesh.cell(ending, argv="--lr 1")
    assert mesh.pull("sys.argv").list == [["own.py", "--mine"]] * 4
    mesh.cell("sys.argv = ['cell']")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--lr '", "No closing quotation"),
        (3, "cannot be read"),
        ([3], "which is no text: write '3'"),
    ],
)
def test_invalid_arguments_are_refused(mesh: cm.Mesh, argv: object, said: str) -> None:
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
    "Lightning, Fabric: an interactive environment": (
        "hasattr(sys, 'ps1') or bool(sys.flags.interactive)",
        False,
    ),
    "transformers, wandb: a notebook": ("'IPKernelApp' in get_ipython().config", False),
    "tqdm.auto: its widgets": ("'ipykernel.zmqshell' in sys.modules", False),
    "huggingface_hub: a notebook": (
        "any(each.__name__ == 'ZMQInteractiveShell' for each in type(get_ipython()).__mro__)",
        False,
    ),
    "rich: HTML": ("type(get_ipython()).__name__ == 'ZMQInteractiveShell'", False),
    "multiprocessing: the main module to run again": (
        "hasattr(__import__('__main__'), '__file__')",
        False,
    ),
    "asyncio.run refuses": ("__import__('asyncio')._get_running_loop() is not None", False),
    "input from a terminal": ("sys.__stdin__.isatty()", False),
    "matplotlib, display: IPython is there": ("'IPython' in sys.modules and __IPYTHON__", True),
    "display, %magics: a shell": ("get_ipython() is not None", True),
}


@pytest.mark.parametrize(("question", "answer"), ASKED.values(), ids=ASKED)
def test_signs_of_a_notebook_are_those_that_help(
    mesh: cm.Mesh, question: str, answer: bool
) -> None:
    mesh.cell(f"import sys; answer = {question}")
    assert mesh.pull("answer").list == [answer] * 4


def test_a_program_that_lacks_arguments_says_how_a_cell_is_given_them(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure) as caught:
        mesh.cell(f"{ARGUMENTS}parser.error('--data is missing')")
    assert '`%%dist --argv "--lr 0.1"` gives a cell arguments' in caught.value.tracebacks[0]
