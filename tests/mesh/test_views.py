"""Views of ranks: stacks, memory, names, timeline and profile, of one mesh."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.inspect import look_at_one
from cellmesh.controller.trace.history import History
from cellmesh.errors import MeshUsageError, RanksInterrupted
from cellmesh.magics.render.inspections import names_table
from cellmesh.magics.render.profiles import show_profile
from cellmesh.wire.inspect import Complete
from tests.conftest import stop_process

from .conftest import Recorder, state_of

STEP = "x = torch.ones(64, 64) @ torch.ones(64, 64)\ndist.all_reduce(x)"


def names(history: History, rank: int) -> list[str]:
    return [one.name for one in history.operations[rank]]


def rows(ranks: cm.Mesh, pattern: str = "*") -> dict[str, dict[str, str]]:
    table = names_table(ranks, pattern)
    return {row[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}


def test_stacks_of_blocked_ranks_are_shown_once_and_from_the_cell_on(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    """Rank 3 sleeps, the others wait for it in a collective."""
    run = mesh.submit_cell(
        "import time\ndef reduce():\n    dist.all_reduce(torch.ones(1))\nprint('here')\n"
        "if rank == 3:\n    time.sleep(60)\nreduce()",
        sink=recorder,
    )
    recorder.wait_for_line("here")
    while {state_of(mesh, rank).collective for rank in range(3)} != {"all_reduce"}:
        pass  # asking takes its time
    text, states = mesh.stacks(), mesh.states()
    run.interrupt()
    assert run.wait(20.0)
    first, second = text.split("\n\n")
    assert first.startswith("ranks 0-2:\n  In[")
    assert "line 7, in <module>\n    reduce()\n" in first
    assert '"torch/distributed/distributed_c10d.py", line ' in first
    assert second.startswith("rank 3:\n  In[")
    assert second.rstrip().endswith("line 6, in <module>\n    time.sleep(60)")
    assert "cellmesh" not in second
    assert (states[3].where, states[3].line, states[3].collective) == ("time.sleep", 6, "")
    assert (states[0].line, states[0].collective, states[0].group) == (3, "all_reduce", "0")


def test_stopped_rank_is_reported_as_not_answering(mesh: cm.Mesh) -> None:
    mesh.cell("pass")  # ranks that rebuild their groups after the last test would have a stack
    pid = mesh.report()[2].pid
    stop_process(pid)
    try:
        text = mesh.stacks()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert text.startswith("ranks 0-1,3:\n  idle\n\nrank 2:\n  did not answer")


def test_a_cells_change_of_memory_is_seen_and_its_peak(mesh: cm.Mesh) -> None:
    mesh.cell("kept = torch.ones(10_000_000) if rank == 0 else None")
    kept, other = state_of(mesh, 0).memory, state_of(mesh, 1).memory
    assert 35e6 < kept.cell_rss < 80e6
    assert other.cell_rss < 20e6
    assert kept.peak_rss >= kept.rss > 0
    mesh.run(len, [])  # a call is no cell
    mesh.cell("kept = None\nbrief = torch.ones(50_000_000)\ndel brief")
    after = state_of(mesh, 0).memory
    assert after.cell_rss < -30e6
    assert after.cell_peak_rss > 100e6
    assert after.execution_count == kept.execution_count + 1


def test_names_of_the_user_and_where_they_differ(mesh: cm.Mesh) -> None:
    mesh.cell(
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "alike = {'a': [1, 2]}\napart = rank % 2\nsize = torch.ones(2 + rank, 3)\n"
        "sharded = distribute_tensor(torch.ones(8, 2), mesh['tp'], [Shard(0)])\n"
        "if rank > 1:\n    only = 'x'\n"
    )
    found = rows(mesh)
    assert {"rank", "world_size", "mesh", "torch", "dist", "device"}.isdisjoint(found)
    assert found["alike"]["between ranks"] == "alike"
    assert found["apart"]["value"] == "[0,2] 0, [1,3] 1"
    assert found["size"]["shape"] == "[0] (2, 3), [1] (3, 3), [2] (4, 3), and 1 more"
    assert found["sharded"]["shape"] == "(8, 2), here (4, 2)"
    assert found["only"]["between ranks"] == "not on 0-1"


def test_busy_ranks_list_and_complete_their_names(mesh: cm.Mesh) -> None:
    mesh.cell("import threading\ngate = threading.Event()\nbound_before = 1")
    run = mesh[:2].submit_cell("gate.wait()")
    while any(state_of(mesh, rank).run < 0 for rank in (0, 1)):
        pass
    try:
        assert rows(mesh, "bound*")["bound_before"]["between ranks"] == "alike"
        answer = look_at_one(mesh[:2].rank_set, Complete("bound_b", 7), 30)
        assert answer is not None
        assert answer.texts == ("bound_before",)
    finally:
        run.interrupt()
        run.wait(30)


def test_ranks_wait_for_the_last_one_and_a_trace_has_it(mesh: cm.Mesh, tmp_path: Path) -> None:
    """Rank 3 begins when it sees the files of the others, which have begun."""
    mesh.push(folder=str(tmp_path))
    mesh.cell(
        "from pathlib import Path\n"
        "if rank == 3:\n"
        "    while len(list(Path(folder).iterdir())) < world_size - 1:\n        pass\n"
        "    dist.all_reduce(torch.ones(3))\n"
        "else:\n"
        "    work = dist.all_reduce(torch.ones(3), async_op=True)\n"
        "    Path(folder, str(rank)).touch()\n"
        "    work.wait()\n"
        "dist.barrier(group=mesh.get_group('tp'))"
    )
    path = tmp_path / "trace.json"
    history = mesh.timeline(1, path)
    (cell,) = history.cells
    for rank in range(4):
        assert names(history, rank) == ["all_reduce", "barrier"]
        reduce, barrier = history.operations[rank]
        assert (reduce.last, reduce.members) == (3, ())
        assert barrier.members == ((0, 1) if rank < 2 else (2, 3))
        assert (reduce.waited_ns == 0) == (rank == 3)
        begin, end = cell.by_rank[rank]
        assert begin <= reduce.start_ns <= reduce.end_ns <= barrier.start_ns <= end
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "barrier"} == {0, 1, 2, 3}
    with pytest.raises(MeshUsageError, match="at least 1"):
        mesh.timeline(0)


def test_running_rank_shows_its_open_operations(mesh: cm.Mesh, tmp_path: Path) -> None:
    run = mesh.submit_cell(
        f"from pathlib import Path\npath = Path({str(tmp_path / 'go_on')!r})\n"
        "while rank == 2 and not path.exists():\n    pass\ndist.barrier()"
    )
    history = History()
    while not all(history.operations.get(rank) for rank in (0, 1, 3)):
        history = mesh.timeline(1)
    assert history.cells[-1].running
    [barrier] = history.operations[0]
    assert (barrier.is_open, barrier.last) == (True, -1)
    (tmp_path / "go_on").touch()
    run.result()
    assert not mesh.timeline(1).cells[-1].running


def test_operators_and_collectives_of_every_rank_are_profiled(
    mesh: cm.Mesh, tmp_path: Path
) -> None:
    profile = mesh.profile(
        f"{STEP}\ndist.all_reduce(x, group=mesh.get_group('tp'))", tmp_path / "t.json"
    )
    assert sorted(profile.by_rank) == [0, 1, 2, 3]
    operators = {(operator.kind, operator.name): operator for operator in profile.operators}
    assert operators["computation", "aten::mm"].num_calls == 1
    assert operators["communication", "gloo:all_reduce"].num_calls == 2
    [cell] = profile.history.cells
    for rank, (first, second) in profile.history.operations.items():
        assert second.members == (rank // 2 * 2, rank // 2 * 2 + 1)
        begin, end = cell.by_rank[rank]
        assert begin < first.start_ns < second.start_ns < end
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["name"] == "gloo:all_reduce"]
    assert sorted(event["pid"] for event in spans) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert f"trace: {tmp_path / 't.json'} (" in show_profile(profile, 1).text


def test_profile_of_a_failed_and_of_an_interrupted_cell_is_kept(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match="rank 1 raised ValueError: odd") as caught:
        mesh.profile(f"{STEP}\nif rank == 1: raise ValueError('odd')\ndist.barrier()")
    profile = caught.value.profile
    assert sorted(profile.by_rank) == [0, 1, 2, 3]

    def interrupt_once_asleep() -> None:
        while {state.where for state in mesh.states().values()} != {"time.sleep"}:
            pass  # asking takes its time
        mesh.interrupt()

    stopper = threading.Thread(target=interrupt_once_asleep)
    stopper.start()
    with pytest.raises(RanksInterrupted) as stopped:
        mesh.profile("import time\ny = torch.ones(3) + 1\ntime.sleep(60)")
    stopper.join()
    assert any(operator.name == "aten::add" for operator in stopped.value.profile.operators)


def test_a_profiler_of_the_ranks_own_is_left_alone(mesh: cm.Mesh) -> None:
    mesh.cell("own = torch.profiler.profile(); own.start()")
    profile = mesh.profile("torch.ones(1) + 1")
    assert "of the rank's own is running" in "".join(profile.notes)
    mesh.cell("own.stop()\nassert any(event.name == 'aten::add' for event in own.events())")


def test_a_rank_that_dies_leaves_no_past_and_the_others_keep_theirs(own_mesh: cm.Mesh) -> None:
    assert own_mesh.timeline().notes == ("no cell has run on the ranks yet",)
    own_mesh.cell("dist.barrier()\nx = 1")
    with pytest.raises(cm.RankFailure, match="SIGKILL") as caught:
        own_mesh.profile("torch.ones(1)\nif rank == 1:\n    import os; os.kill(os.getpid(), 9)")
    profile = caught.value.profile
    assert (sorted(profile.by_rank), profile.missing) == ([0], {1: "it has died"})
    assert own_mesh.timeline().notes == (
        "nothing of rank 1: was killed by SIGKILL; what it did is gone with it",
    )
    table = names_table(own_mesh, "*")
    assert table.notes[0].startswith("rank 1: RankDied: ")
    own_mesh.heal()
    own_mesh.cell("dist.barrier()")
    assert own_mesh.timeline().notes == ()
