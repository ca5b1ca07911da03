"""A notebook is run again: Run All, the extension loaded or reloaded, the kernel restarted, in real
kernels; or executed by a program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import clean_runtime_dir, kernel_config

from .test_kernel import Notebook, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir(), open_notebook() as opened:
        assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
        opened.run("%%dist\nheld = rank + 40")
        yield opened


def held(notebook: Notebook) -> str:
    return notebook.run("%%dist\nheld").text()


HELD = "[0] 40\n[1] 41\n"


def test_a_habit_keeps_the_mesh_and_its_state(notebook: Notebook) -> None:
    for act in (
        "%load_ext cellmesh",
        "%reload_ext cellmesh",
        "%reset -f",
        "%load_ext cellmesh\n%dist_start 2",
    ):
        outcome = notebook.run(act)
        assert outcome.status == "ok", act
        assert held(notebook) == HELD, act
    assert notebook.run("%unload_ext cellmesh").status == "ok"
    assert "2 ranks are running and kept" in str(notebook.run("%load_ext cellmesh").messages)
    assert held(notebook) == HELD


def test_a_start_with_other_options_says_what_to_type(notebook: Notebook) -> None:
    for options, advice in (
        ("3", "runs with 2 ranks, not 3: `%dist_resize 3` gives it that number"),
        ("2 --mesh dp=1,tp=2", "runs with mesh dp=2: `%dist_mesh dp=1 tp=2` gives it these dims"),
    ):
        assert advice in notebook.run(f"%dist_start {options}").errors()[-1]["evalue"]
    assert held(notebook) == HELD


def test_a_failure_of_ranks_is_shown_right_whatever_shows_tracebacks(notebook: Notebook) -> None:
    notebook.run(
        "def show(shell, kind, error, tb, tb_offset=None):\n"
        "    print('mine', kind.__name__)\n"
        "    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)\n"
        "get_ipython().set_custom_exc((Exception,), show)"
    )
    failed = notebook.run("%%dist\n1 / 0")
    assert failed.errors()[-1]["ename"] == "RankFailure"
    assert "ZeroDivisionError" in failed.errors()[-1]["evalue"]
    assert "cellmesh/magics" not in str(failed.messages)
    assert "mine ZeroDivisionError" in notebook.run("1 / 0").text()
    notebook.run("get_ipython().set_custom_exc((), None)")


def test_a_mesh_that_a_restarted_kernel_has_left_is_named_attached_and_ended(
    runtime_dir: Path,
) -> None:
    lives_on = "held by nobody, and lives on for 30 min"
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh\n%dist_start 2 --name left")
        opened.run("%%dist\nheld = rank + 40")
        opened.client.stop_channels()
        opened.manager.restart_kernel(now=True)
        again = Notebook(opened.manager)
        loaded = str(again.run("%load_ext cellmesh").messages)
        assert lives_on in loaded
        assert "`%dist_attach left` has it again, `%dist_stop left` ends it" in loaded
        refused = again.run("%dist_start 2 --name left").errors()[-1]["evalue"]
        assert lives_on in refused
        assert "`%dist_start ... --fresh` ends it" in refused
        assert "attached to left" in str(again.run("%dist_attach left").messages)
        assert held(again) == HELD
        again.run("%dist_detach")
        assert "left has ended" in str(again.run("%dist_start 2 --name left --fresh").messages)
        assert again.run("%%dist\nprint(1)").text() == "[0-1] 1\n"
        assert again.run("%dist_stop left").status == "ok"
        assert "there is no mesh 'left'" in again.run("%dist_stop left").errors()[-1]["evalue"]
        again.client.stop_channels()


ZYGOTE = """import psutil
from cellmesh.wire.ticket import read_ticket
agent = psutil.Process(read_ticket(mesh.rank_set.session.ticket.path).agent_pid)
zygote, = (each for each in agent.children() if each.name() == "cellmesh-zygote")
"""
# Cells of an executed notebook by what happens in them.
CELLS = {
    "start": "%load_ext cellmesh\n%dist_start 2 --auto-heal",
    "fill": "%%dist\nimport os, signal\nkept = 1",
    "raise": "%%dist\nif rank == 1: raise ValueError\ndist.all_reduce(torch.ones(1))",
    "kill": "%%dist\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    "dist.all_reduce(torch.ones(1))",
    "other": "%%dist --ranks 0\nkept",
    "replaced": "%%dist\nrank",
    "again": "%%dist\nrank",
    "hold up": f"{ZYGOTE}zygote.suspend()",
    "kill slowly": "%%dist --ranks 1\nimport os; os._exit(3)",
    "go on": "zygote.resume()",
    "late": "%%dist\nrank",
    "stop": "%dist_stop",
}


def test_notes_on_a_recovery_are_in_the_cell_that_failed_and_in_the_next_one_once() -> None:
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.values()]
    for name, cell in zip(CELLS, cells, strict=True):
        if name in ("raise", "kill", "kill slowly"):
            cell.metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with clean_runtime_dir():
        asyncio.run(NotebookClient(notebook, timeout=120, config=kernel_config()).async_execute())
    saved = {name: str(cell.outputs) for name, cell in zip(CELLS, notebook.cells, strict=True)}
    assert "process groups rebuilt in" in saved["raise"]
    assert "rank 1 is new and empty, process groups rebuilt in" in saved["kill"]
    assert "is new and empty" not in saved["other"]
    assert "rank 1 was killed by SIGKILL; it is new and empty" in saved["replaced"]
    assert "is new and empty" not in saved["again"]
    assert "is new and empty" not in saved["kill slowly"] + saved["hold up"]
    number = list(CELLS).index("kill slowly") + 1
    assert f"after In[{number}] had ended: rank 1 is new and empty" in saved["go on"]
    assert "rank 1 exited with code 3; it is new and empty" in saved["late"]
