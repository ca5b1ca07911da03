"""Scripts in cells: how they end, run from a file, and start processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.output.fold import Rich
from tests.mesh.conftest import Recorder
from tests.mesh.test_output import run_cell

CLICK = (
    "import click\n@click.command()\n@click.option('--n', default={})\n"
    "def main(n):\n    if n: raise click.ClickException('no')\nmain()"
)


@pytest.mark.parametrize(
    "leave",
    [
        "exit()",
        "quit()",
        "import sys; sys.exit()",
        "get_ipython().run_cell('1')\nexit()",
        "import sys; sys.exit(False)",
        "raise SystemExit",
        "await __import__('asyncio').sleep(0)\nexit()",
        "%%capture\nexit()",
        "%time exit()",
        CLICK.format(0),
    ],
)
def test_an_exit_with_status_0_ends_the_cell_well(quick: cm.Mesh, leave: str) -> None:
    first, _, rest = leave.partition("\n")
    magic, body = (first + "\n", rest) if first.startswith("%%") else ("", leave)
    quick.cell(f"{magic}value = 'before'\n{body}\nvalue = 'after'")
    assert quick.pull("value").list == ["before"] * 2


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        ("exit(3)", "3"),
        ("import sys\ndef main(): return 4\nsys.exit(main())", "4"),
        ("import sys; sys.exit('no data')", "no data"),
        ("%%capture\nexit(3)", "3"),
        (CLICK.format(1), "1"),
    ],
)
def test_another_status_fails_the_cell_with_it(
    quick: cm.Mesh, leave: str, status: str, recorder: Recorder
) -> None:
    with pytest.raises(cm.RankFailure, match=f"SystemExit: ({status})"):
        run_cell(quick, leave, recorder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in {
        "fails.py": "import sys\nmade = 1\nraise ValueError(f'no {sys.argv[1:]}')\n",
        "ends.py": "import sys\nmade = 2\nsys.exit()\n",
        "exits.py": "import sys\nsys.exit(7)\n",
        "waits.py": (
            "import torch.distributed as dist\nassert __name__ == '__main__'\n"
            "if dist.get_rank(): raise ValueError('odd')\ndist.barrier()\n"
        ),
        "fails.ipy": "x = 1\n1 / 0\n",
    }.items():
        (folder / name).write_text(text)
    return folder


FAILS = {
    "run": (
        "%run {}/fails.py --lr 0.1",
        "ValueError: no \\['--lr', '0.1'\\].*fails.py line 3, called at line 1",
    ),
    "run in the namespace": ("%run -i {}/fails.py", "ValueError: no"),
    "run of a module": ("import sys; sys.path.insert(0, '{}')\n%run -m fails", "ValueError: no"),
    "run of magics": ("%run {}/fails.ipy", "ZeroDivisionError"),
    "exit of a script": ("%run {}/exits.py", "SystemExit: 7"),
    "capture": ("%%capture out\nprint('seen')\n1 / 0", "ZeroDivisionError"),
    "capture with a syntax error": ("%%capture\nx = = 1", "SyntaxError"),
    "cell in a cell": ("get_ipython().run_cell('1 / 0')", "ZeroDivisionError"),
    "script in a cell in a cell": (
        "get_ipython().run_cell('%run {}/fails.py')",
        "ValueError: no",
    ),
    "time": ("%time 1 / 0", "ZeroDivisionError"),
    "no directory": ("%cd {}/nowhere", "FileNotFoundError.*nowhere"),
    "display": (
        "class Odd:\n    def _repr_html_(self): raise ValueError('no html')\nOdd()",
        "ValueError: no html",
    ),
    "hook": (
        "def hook():\n    get_ipython().events.unregister('post_execute', hook)\n    1 / 0\n"
        "get_ipython().events.register('post_execute', hook)",
        "ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_traceback_of_ipython_fails_the_cell(
    quick: cm.Mesh, name: str, folder: Path, recorder: Recorder
) -> None:
    source, error = FAILS[name]
    with pytest.raises(cm.RankFailure, match=error):
        run_cell(quick, source.replace("{}", str(folder)), recorder)
    assert not [line for _, line in recorder.lines() if "Traceback" in line]


def test_the_value_of_a_captured_cell_is_captured(quick: cm.Mesh, recorder: Recorder) -> None:
    run_cell(quick, "%%capture out\n'a value'", recorder)
    assert not recorder.items(Rich)
    assert quick.pull("len(out.outputs)").list == [1, 1]


def test_what_a_failed_capture_has_captured_is_kept(quick: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match="ZeroDivisionError"):
        quick.cell("%%capture out\nprint('seen')\n1 / 0")
    assert quick.pull("out.stdout").list == ["seen\n"] * 2


def test_the_peers_of_a_script_that_fails_are_released_and_show_nothing(
    quick: cm.Mesh, folder: Path, recorder: Recorder
) -> None:
    with pytest.raises(cm.RankFailure, match=r"rank 1 raised ValueError: odd.*rank 0 waited in"):
        run_cell(quick, f"%run {folder}/waits.py\nafter = True", recorder)
    assert not [line for _, line in recorder.lines() if "Released" in line]
    assert quick.pull("'after' in globals()").list == [False, False]


def test_a_script_that_ends_well_leaves_its_names_and_the_cell_goes_on(
    quick: cm.Mesh, folder: Path
) -> None:
    quick.cell(f"%run {folder}/ends.py\nafter = made")
    assert quick.pull("after").list == [2, 2]


def test_the_last_traceback_can_be_shown_again(quick: cm.Mesh, recorder: Recorder) -> None:
    with pytest.raises(cm.RankFailure):
        quick.cell("1 / 0")
    run_cell(quick, "%tb", recorder)
    assert any("ZeroDivisionError" in line for _, line in recorder.lines())
