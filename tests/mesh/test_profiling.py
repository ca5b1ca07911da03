"""A cell under the profiler on real ranks: what is seen, whatever becomes of the cell."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.trace import profile as profiling
from cellmesh.errors import MeshUsageError, RanksInterrupted
from cellmesh.magics.render.profiles import show_profile

STEP = "x = torch.ones(64, 64) @ torch.ones(64, 64)\ndist.all_reduce(x)"


def test_operators_and_collectives_of_every_rank_are_seen(mesh: cm.Mesh) -> None:
    profile = mesh.profile(f"{STEP}\ndist.all_reduce(x, group=mesh.get_group('tp'))")
    assert sorted(profile.by_rank) == [0, 1, 2, 3]
    assert not profile.missing
    operators = {(operator.kind, operator.name): operator for operator in profile.operators}
    assert operators["computation", "aten::mm"].num_calls == 1
    assert operators["communication", "gloo:all_reduce"].num_calls == 2
    [cell] = profile.history.cells
    for rank, (first, second) in profile.history.operations.items():
        assert (first.name, first.members) == ("all_reduce", ())
        assert (second.name, second.members) == ("all_reduce", (rank // 2 * 2, rank // 2 * 2 + 1))
        begin, end = cell.by_rank[rank]
        assert begin < first.start_ns < second.start_ns < end
        assert profile.history.times(rank, cell).compute_ns > 0
        assert not profile.by_rank[rank].trace
    assert sum(one.num_last for one in profile.lateness.values()) == 3


def test_the_traces_become_one_file(mesh: cm.Mesh, tmp_path: Path) -> None:
    profile = mesh.profile(STEP, tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert profile.trace_path == tmp_path / "t.json"
    events = json.loads(profile.trace_path.read_text())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    spans = [event for event in events if event["name"] == "gloo:all_reduce"]
    assert sorted(event["pid"] for event in spans) == [0, 1, 2, 3]
    # On one clock: nobody has ended before the last one began.
    assert max(event["ts"] for event in spans) <= min(event["ts"] + event["dur"] for event in spans)
    assert f"trace: {tmp_path / 't.json'} (" in show_profile(profile, 1).text


def test_profile_of_a_failed_cell_is_kept(mesh: cm.Mesh, tmp_path: Path) -> None:
    with pytest.raises(cm.RankFailure, match="rank 1 raised ValueError: odd") as caught:
        mesh.profile(
            f"{STEP}\nif rank == 1: raise ValueError('odd')\ndist.barrier()", tmp_path / "t.json"
        )
    profile = caught.value.profile
    assert sorted(profile.by_rank) == [0, 1, 2, 3]
    assert profile.trace_path.exists()
    assert profile.lateness[1].num_missed == 1
    assert "rank 1 never began 1 collective" in profile.history.describe()
    mesh.cell("dist.barrier()")


def test_a_cell_that_is_interrupted_has_its_profile(mesh: cm.Mesh) -> None:
    stopper = threading.Timer(0, lambda: _interrupt_once_asleep(mesh))
    stopper.start()
    with pytest.raises(RanksInterrupted) as caught:
        mesh.profile("import time\ny = torch.ones(3) + 1\ntime.sleep(60)")
    stopper.join()
    assert sorted(caught.value.profile.by_rank) == [0, 1, 2, 3]
    assert any(operator.name == "aten::add" for operator in caught.value.profile.operators)


def _interrupt_once_asleep(mesh: cm.Mesh) -> None:
    while {state.where for state in mesh.states().values()} != {"time.sleep"}:
        pass  # asking takes its time
    mesh.interrupt()


def test_the_profiler_has_ended_with_the_cell(mesh: cm.Mesh) -> None:
    mesh.profile(STEP)
    with pytest.raises(cm.RankFailure):
        mesh.profile("1 / 0")
    mesh.cell("with torch.profiler.profile() as own: torch.ones(1)\nassert own.events()")


def test_a_trace_that_is_too_long_stays_where_its_rank_wrote_it(
    mesh: cm.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MAX_TRACE_BYTES", 100)
    profile = mesh[0:2].profile("torch.ones(1)", tmp_path / "t.json")
    assert profile.trace_path is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.rank0.json", "t.rank1.json"]
    assert "traceEvents" in json.loads((tmp_path / "t.rank1.json").read_text())
    assert f"it is in {tmp_path / 't.rank1.json'}" in "".join(profile.notes)


def test_a_place_where_no_trace_can_be_is_refused_before_the_cell_runs(
    mesh: cm.Mesh, tmp_path: Path
) -> None:
    with pytest.raises(MeshUsageError, match="no directory"):
        mesh.profile("ran = True", tmp_path / "nowhere" / "t.json")
    with pytest.raises(
        MeshUsageError, match=r"is a directory: give the trace a file name, like .*trace\.json"
    ):
        mesh.profile("ran = True", tmp_path)
    assert set(mesh.pull("'ran' in globals()").values()) == {False}


def test_a_profiler_of_the_users_own_is_not_disturbed(mesh: cm.Mesh) -> None:
    mesh.cell("own = torch.profiler.profile()\nown.start()")
    profile = mesh.profile("y = torch.ones(3) + 1")
    assert all("of the rank's own is running" in one.problem for one in profile.by_rank.values())
    assert "of the rank's own is running" in "".join(profile.notes)
    mesh.cell("own.stop()\nassert any(event.name == 'aten::add' for event in own.events())")


def test_a_cell_that_profiles_itself_is_not_disturbed(mesh: cm.Mesh) -> None:
    source = "with torch.profiler.profile() as own: torch.ones(1)\nassert own.events()"
    profile = mesh.profile(source)
    assert all("of its own" in one.problem for one in profile.by_rank.values())


def test_of_a_rank_that_dies_there_is_nothing(own_mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match="SIGKILL") as caught:
        own_mesh.profile("torch.ones(1)\nif rank == 1:\n    import os; os.kill(os.getpid(), 9)")
    profile = caught.value.profile
    assert sorted(profile.by_rank) == [0]
    assert profile.missing == {1: "it has died"}
