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

from cellmesh.controller.session.attach import attach, stop_mesh
from cellmesh.controller.session.living import living_meshes
from cellmesh.errors import MeshUsageError
from tests.conftest import check_nothing_left, kernel_config, own_runtime_dir

from .test_kernel import Notebook, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
            opened.run("%%dist\nheld = rank + 40")
            yield opened
        check_nothing_left(directory)


def held(notebook: Notebook) -> str:
    return notebook.run("%%dist\nheld").text()


HELD = "[0] 40\n[1] 41\n"


@pytest.mark.parametrize(
    "act",
    [
        "%load_ext cellmesh",
        "%reload_ext cellmesh",
        "%reset -f",
        "%load_ext cellmesh\n%dist_start 2",
        "%unload_ext cellmesh\n%load_ext cellmesh",
    ],
)
def test_a_habit_keeps_the_mesh_and_its_state(notebook: Notebook, act: str) -> None:
    outcome = notebook.run(act)
    assert outcome.status == "ok"
    assert "runs on" not in outcome.text()
    assert held(notebook) == HELD


def test_a_second_start_keeps_the_mesh_and_binds_its_name(notebook: Notebook) -> None:
    notebook.run("del mesh")
    started = notebook.run("%dist_start 2")
    kept = "2 ranks are running and kept; `%dist_restart` renews them"
    assert kept in str(started.messages)
    assert notebook.run("len(mesh)").data("execute_result")[0]["text/plain"] == "2"


def test_a_second_start_may_fold_numbers_or_not(notebook: Notebook) -> None:
    for options, folds in (("--fold-numbers off", "False"), ("", "True")):
        started = notebook.run(f"%dist_start 2 {options}\nmesh.fold_numbers")
        assert started.data("execute_result")[0]["text/plain"] == folds
    assert held(notebook) == HELD


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("3", "runs with 2 ranks, not 3: `%dist_resize 3` gives it that number"),
        ("2 --mesh dp=1,tp=2", "runs with mesh dp=2: `%dist_mesh dp=1 tp=2` gives it these dims"),
        ("2 --settle 5", "runs with --settle 1, not 5: `%dist_start ... --fresh` ends it"),
        ("2 --auto-heal", "runs with --auto-heal off, not on"),
    ],
)
def test_a_start_with_other_options_says_what_to_type(
    notebook: Notebook, options: str, advice: str
) -> None:
    outcome = notebook.run(f"%dist_start {options}")
    assert outcome.status == "error"
    assert advice in outcome.errors()[-1]["evalue"]
    assert held(notebook) == HELD


def test_unloading_says_that_the_mesh_runs_on(notebook: Notebook) -> None:
    assert "runs on: `%load_ext cellmesh`" in notebook.run("%unload_ext cellmesh").text()
    loaded = notebook.run("%load_ext cellmesh")
    assert "2 ranks are running and kept" in str(loaded.messages)
    assert held(notebook) == HELD


@pytest.mark.parametrize(
    "library",
    [
        "def show(shell, kind, error, tb, tb_offset=None):\n"
        "    print('mine', kind.__name__)\n"
        "    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)\n"
        "get_ipython().set_custom_exc((Exception,), show)",
        "import rich.traceback; rich.traceback.install()",
    ],
)
def test_a_failure_of_ranks_is_shown_right_whatever_shows_tracebacks(
    notebook: Notebook, library: str
) -> None:
    notebook.run(f"before = get_ipython().CustomTB\n{library}")
    failed = notebook.run("%%dist\n1 / 0")
    assert failed.errors()[-1]["ename"] == "RankFailure"
    assert "ZeroDivisionError" in failed.errors()[-1]["evalue"]
    assert "cellmesh/magics" not in str(failed.messages)
    own = notebook.run("1 / 0")
    assert "ZeroDivisionError" in str(own.messages)
    assert ("mine ZeroDivisionError" in own.text()) == ("def show" in library)
    notebook.run("get_ipython().set_custom_exc((), None)")


def test_the_notes_on_a_recovery_are_in_the_cell_that_caused_it(notebook: Notebook) -> None:
    died = notebook.run(
        "%%dist\nimport os, torch, torch.distributed as dist\n"
        "os._exit(3) if rank == 1 else dist.all_reduce(torch.ones(1))"
    )
    assert died.status == "error"
    assert "rank 1 is dead: `%dist_heal` replaces it" in str(died.messages)
    kept = str(notebook.run("%dist_start 2").messages)
    assert "rank 1 is dead: `%dist_heal` replaces it" in kept


def test_a_fresh_start_renews_and_replaced_ranks_are_named_in_the_next_cell(
    notebook: Notebook,
) -> None:
    assert notebook.run("%dist_start 2 --fresh --auto-heal").status == "ok"
    assert "NameError" in str(notebook.run("%%dist\nheld").messages)
    notebook.run("%%dist\nkept = 1")
    died = notebook.run("%%dist --ranks 1\nimport os; os._exit(3)")
    assert "rank 1 is new and empty" in str(died.messages)
    assert "new and empty" not in str(notebook.run("%%dist --ranks 0\nkept").messages)
    assert "it is new and empty" in str(notebook.run("%%dist --ranks 1\n1").messages)
    assert "new and empty" not in str(notebook.run("%%dist\n1").messages)


@pytest.fixture(scope="module")
def left() -> Iterator[Notebook]:
    """A notebook whose kernel was restarted, which has left a mesh of two ranks, ``left``."""
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            opened.run("%load_ext cellmesh\n%dist_start 2 --name left")
            opened.run("%%dist\nheld = rank + 40")
            opened.client.stop_channels()
            opened.manager.restart_kernel(now=True)
            again = Notebook(opened.manager)
            yield again
            again.client.stop_channels()
        for name in living_meshes():  # where a test that ends one did not run
            stop_mesh(name)
        check_nothing_left(directory)


LIVES_ON = "left, of this notebook, lives on for 30 min: 2 ranks,"


def test_loading_after_a_restart_says_that_the_mesh_lives_on(left: Notebook) -> None:
    loaded = str(left.run("%load_ext cellmesh").messages)
    assert LIVES_ON in loaded
    assert "`%dist_attach left` has it again, `%dist_stop left` ends it" in loaded


def test_a_start_after_a_restart_offers_the_mesh_first(left: Notebook) -> None:
    outcome = left.run("%dist_start 2 --name left")
    assert outcome.status == "error"
    assert LIVES_ON in outcome.errors()[-1]["evalue"]
    assert "`%dist_start ... --fresh` ends it" in outcome.errors()[-1]["evalue"]


def test_another_start_names_the_mesh_and_an_attach_takes_the_only_one_that_is_free(
    left: Notebook,
) -> None:
    started = left.run("%dist_start 1 --name second")
    assert started.status == "ok"
    assert LIVES_ON in str(started.messages)
    with open_notebook() as other:
        other.run("%load_ext cellmesh")
        assert "attached to left" in str(other.run("%dist_attach").messages)
        assert held(other) == HELD
        refused = left.run("%dist_stop left").errors()[-1]["evalue"]
        assert "left is held by process" in refused
        other.run("%dist_detach")
    left.run("%dist_detach")
    with pytest.raises(MeshUsageError, match="say which one, as in `%dist_attach second`") as named:
        attach()
    rows = str(named.value).splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [["left", "2"], ["second", "1"]]
    assert all("nobody for" in row for row in rows)
    # Of two that are free, the one that this notebook has held last.
    assert "attached to second" in str(left.run("%dist_attach").messages)
    left.run("%dist_detach")


def test_a_stop_by_name_ends_one_and_a_fresh_start_ends_the_one_that_was_offered(
    left: Notebook,
) -> None:
    assert "left has ended" in left.run("%dist_stop left").text()
    fresh = left.run("%dist_start 1 --name second --fresh")
    assert "second has ended" in str(fresh.messages)
    assert left.run("%%dist\nrank").text() == "[0] 0\n"
    assert left.run("%dist_stop second").status == "ok"
    assert "there is no mesh 'second'" in left.run("%dist_stop second").errors()[-1]["evalue"]


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The outputs, as text, of a notebook that nbclient has executed and saved."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()]
    )
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        if name in ("raise", "kill", "kill slowly"):
            cell.metadata["tags"] = ["raises-exception"]
    path: Path = tmp_path_factory.mktemp("executed") / "saved.ipynb"
    with own_runtime_dir() as directory:
        asyncio.run(NotebookClient(notebook, timeout=120, config=kernel_config()).async_execute())
        check_nothing_left(directory)
    nbformat.write(notebook, path)
    cells = nbformat.read(path, 4).cells
    return {name: str(cell.outputs) for name, cell in zip(CELLS, cells, strict=True)}


EMPTY = "is new and empty"


def test_notes_on_a_recovery_are_in_the_cell_that_failed(saved: dict[str, str]) -> None:
    assert "process groups rebuilt in" in saved["raise"]
    assert f"rank 1 {EMPTY}, process groups rebuilt in" in saved["kill"]


def test_the_next_cell_on_a_replaced_rank_names_it_once(saved: dict[str, str]) -> None:
    assert EMPTY not in saved["other"]
    assert f"rank 1 was killed by SIGKILL; it {EMPTY}" in saved["replaced"]
    assert EMPTY not in saved["again"]


def test_the_note_on_a_slow_recovery_is_in_the_next_cell(saved: dict[str, str]) -> None:
    assert "rank 1 exited with code 3" in saved["kill slowly"]
    assert EMPTY not in saved["kill slowly"]
    assert EMPTY not in saved["hold up"]
    number = list(CELLS).index("kill slowly") + 1
    assert f"after In[{number}] had ended: rank 1 {EMPTY}" in saved["go on"]
    assert f"rank 1 exited with code 3; it {EMPTY}" in saved["late"]
