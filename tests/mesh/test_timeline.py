"""What real ranks tell of their last cells, and `%dist_timeline` in a real kernel."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.inspect import look_at_one
from cellmesh.controller.ranks import seed_ranks
from cellmesh.controller.trace.history import History
from cellmesh.controller.trace.operations import Operation
from cellmesh.errors import MeshUsageError, NoMeshError
from cellmesh.magics.render.inspections import names_table
from cellmesh.magics.render.profiles import draw
from cellmesh.wire.inspect import Complete
from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import Notebook, open_notebook


def names(history: History, rank: int) -> list[str]:
    return [one.name for one in history.operations[rank]]


def only(history: History, rank: int, name: str) -> Operation:
    (found,) = (one for one in history.operations[rank] if one.name == name)
    return found


def test_ranks_wait_for_the_last_one(mesh: cm.Mesh, tmp_path: Path) -> None:
    """Rank 3 comes when the others have all begun: it sees their files."""
    mesh.push(folder=str(tmp_path))
    mesh.cell(
        "from pathlib import Path\nfolder = Path(folder)\n"
        "def come(late):\n"
        "    if rank == late:\n"
        "        while len(list(folder.iterdir())) < world_size - 1:\n"
        "            pass\n"
        "        dist.all_reduce(torch.ones(3))\n"
        "    else:\n"
        "        work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "        (folder / str(rank)).touch()\n"
        "        work.wait()\n"
        "    dist.barrier(group=mesh.get_group('tp'))"
    )
    mesh.cell("come(3)")
    history = mesh.timeline(1)
    (cell,) = history.cells
    assert cell.by_rank.keys() == {0, 1, 2, 3}
    for rank in range(4):
        assert names(history, rank) == ["all_reduce", "barrier"]
        reduce, barrier = history.operations[rank]
        assert (reduce.last, reduce.members) == (3, ())
        assert barrier.members == ((0, 1) if rank < 2 else (2, 3))
        assert barrier.last in barrier.members
        assert reduce.wait_ns is not None
        assert (reduce.wait_ns == reduce.start_ns) == (rank == 3)
        assert (reduce.waited_ns == 0) == (rank == 3)
        begin, end = cell.by_rank[rank]
        assert (
            begin <= reduce.start_ns <= reduce.end_ns <= barrier.start_ns <= barrier.end_ns <= end
        )
    assert history.lateness()[3].num_last >= 1
    assert [one.title for one in mesh[1:3].timeline(2).cells][-1] == cell.title
    assert mesh[1:3].timeline().ranks == (1, 2)
    with pytest.raises(MeshUsageError, match="at least 1"):
        mesh.timeline(0)


def test_an_asynchronous_end_is_that_of_the_work(mesh: cm.Mesh) -> None:
    mesh.cell(
        "work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "while not work.is_completed():\n    pass\n"
        "dist.all_gather_object([None] * world_size, rank)\n"
        "work.wait()\n"
        "dist.broadcast(torch.ones(1), 0)"
    )
    for one in mesh.timeline(1).operations.values():
        reduce = next(each for each in one if each.name == "all_reduce")
        gathered = next(each for each in one if each.name == "all_gather")
        assert not reduce.is_open
        assert reduce.wait_ns is not None
        assert reduce.end_ns <= gathered.start_ns <= gathered.end_ns <= reduce.wait_ns


def test_collectives_that_cpp_waits_for_have_ends(mesh: cm.Mesh) -> None:
    mesh.cell(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "import torch.distributed._functional_collectives as functional"
    )
    mesh.cell(
        "model(torch.ones(2, 4)).sum().backward()\n"
        "y = functional.all_reduce(torch.ones(2), 'sum', dist.group.WORLD) + 1"
    )
    history = mesh.timeline(1)
    for rank in range(4):
        ours = history.operations[rank]
        assert names(history, rank) == ["all_reduce", "all_reduce"]
        assert [one.wait_ns is None for one in ours] == [True, False]
        assert all(one.last != -1 for one in ours)
        assert all(one.start_ns < one.end_ns for one in ours)


def test_messages_wait_for_their_other_side(mesh: cm.Mesh) -> None:
    mesh.cell(
        "x = torch.ones(1)\n"
        "if rank == 0:\n    dist.send(x, 2)\n    dist.isend(x, 1).wait()\n"
        "elif rank in (1, 2):\n    dist.recv(x, 0)"
    )
    history = mesh.timeline(1)
    assert [(one.name, one.peer) for one in history.operations[0]] == [("send", 2), ("send", 1)]
    for rank in (1, 2):
        received = only(history, rank, "recv")
        assert received.peer == 0
        assert received.last in (0, rank)
        assert not received.is_open
    assert history.operations[3] == []
    assert history.describe() == ""


def test_running_rank_shows_its_open_operations(mesh: cm.Mesh, tmp_path: Path) -> None:
    run = mesh.submit_cell(
        f"from pathlib import Path\npath = Path({str(tmp_path / 'go_on')!r})\n"
        "while rank == 2 and not path.exists():\n    pass\n"
        "dist.barrier()"
    )
    history = History()
    while not all(history.operations.get(rank) for rank in (0, 1, 3)):
        history = mesh.timeline(1)
    assert history.is_running
    assert only(history, 0, "barrier").is_open
    assert only(history, 0, "barrier").last == 2
    assert history.operations[2] == []
    assert "rank 2 has not begun 1 collective" in draw(history, [], []).text
    (tmp_path / "go_on").touch()
    run.result()
    assert not mesh.timeline(1).is_running


def test_calls_count_and_a_trace_is_written(mesh: cm.Mesh, tmp_path: Path) -> None:
    def step() -> None:
        import torch.distributed as dist

        dist.barrier()

    mesh.run(step)
    # What magics and widgets ask is no cell.
    seed_ranks(mesh, 1)
    mesh.inspect("rank")
    names_table(mesh, "*")
    assert look_at_one(mesh.rank_set, Complete("ra", 2), 20.0) is not None
    path = tmp_path / "trace.json"
    history = mesh.timeline(1, path)
    assert [one.title for one in history.cells] == ["step()"]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "barrier"} == {0, 1, 2, 3}
    with pytest.raises(MeshUsageError, match="no directory"):
        mesh.timeline(1, tmp_path / "nowhere" / "trace.json")


def test_failed_operations_are_shown_and_healed_groups_are_matched(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure):
        mesh.cell(
            "dist.barrier()\nif rank == 1:\n    raise "
            "ValueError('odd')\ndist.all_reduce(torch.ones(1))"
        )
    mesh.heal()
    mesh.cell("dist.barrier()")
    failed = mesh.timeline(2)
    assert names(failed, 0) == ["barrier", "all_reduce", "barrier"]
    assert names(failed, 1) == ["barrier", "barrier"]
    assert not any(one.is_open for one in failed.operations[0])
    before, _, after = failed.operations[0]
    assert before.generation < after.generation
    assert failed.lateness()[1].num_missed == 1
    assert failed.operations[1][1].last != -1


def test_a_rank_that_died_has_taken_its_past_along(own_mesh: cm.Mesh) -> None:
    assert own_mesh.timeline().notes == ("no cell has run on the ranks yet",)
    own_mesh.cell("dist.barrier()")
    pid = own_mesh.report()[1].pid
    run = own_mesh.submit_cell("import time\nif rank == 1:\n    time.sleep(600)")
    os.kill(pid, signal.SIGKILL)
    run.wait()
    history = own_mesh.timeline()
    assert history.ranks == (0,)
    assert history.notes == (
        "nothing of rank 1: was killed by SIGKILL; what it did is gone with it",
    )
    own_mesh.heal()
    own_mesh.cell("dist.barrier()")
    history = own_mesh.timeline()
    assert history.notes[0].startswith("rank 1 replaced another after In[2]")
    assert history.lateness()[1].num_missed == 0
    assert [one.last != -1 for one in history.operations[0]] == [False, True]
    own_mesh.stop()
    with pytest.raises(NoMeshError, match="start another"):
        own_mesh.timeline()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh").status == "ok"
            yield opened
        check_nothing_left(directory)


def test_the_magic_shows_a_picture_and_a_text(notebook: Notebook, tmp_path: Path) -> None:
    assert "no mesh is running" in notebook.run("%dist_timeline").errors()[0]["evalue"]
    assert notebook.run("%dist_start 2").status == "ok"
    notebook.run("%%dist\ndist.barrier()")
    path = tmp_path / "trace.json"
    [shown] = notebook.run(f"%dist_timeline --cells 1 -o {path}").data("execute_result")
    assert 'class="cellmesh-timeline"' in shown["text/html"]
    assert "<svg" not in shown["text/html"]
    assert "A barrier" in shown["text/plain"]
    assert "In[4]" in shown["text/plain"]
    assert f"trace: {path}" in shown["text/plain"]
    assert json.loads(path.read_text())["traceEvents"]
    [one] = notebook.run("%dist_timeline --ranks 1").data("execute_result")
    assert "rank 0" not in one["text/plain"]
    assert (
        "Did you mean '--cells'?" in notebook.run("%dist_timeline --cell 1").errors()[0]["evalue"]
    )
    assert notebook.run("%dist_stop").status == "ok"
