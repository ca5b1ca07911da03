"""Both sides of a mesh in memory: from its start over restarts to its end."""

from __future__ import annotations

import pytest

from cellmesh.errors import RankFailure
from cellmesh.wire.messages import MeshReady, StartFailed, Stopped

from ..support.scripted import World


def test_start_of_a_mesh_reports_its_progress() -> None:
    world = World(3).start()
    assert [change.state for change in world.changes][-1] == "ready"
    stages = [getattr(change.cause, "stage", "") for change in world.changes]
    assert stages == ["", "importing torch", "forking ranks", *["process group"] * 3, ""]
    [ready] = world.causes(MeshReady)
    infos = [(info.rank, info.pid, info.phase) for info in ready.ranks]
    assert infos == [(rank, 1000 + rank, "idle") for rank in range(3)]
    assert world.core.mesh.ranks == ready.ranks


def test_a_mesh_is_not_ready_before_its_last_rank() -> None:
    world = World(2)
    world.import_torch()
    for rank, state in ((1, "starting"), (0, "ready")):
        world.ranks[rank].ready()
        world.deliver()
        assert world.core.state == state


def test_a_rank_that_dies_while_it_starts_fails_the_start() -> None:
    world = World(3)
    world.import_torch()
    world.reap(1, "exited with code 1", "ImportError: no")
    world.deliver()
    [failed] = world.causes(StartFailed)
    assert failed.fault == "host"
    assert "rank 1 exited with code 1 while it started\nImportError: no" in failed.text
    assert world.ended == 0
    world.reap_doomed()
    assert world.ended == 1
    assert world.core.state == "ended"


# ---- restarting


def test_a_restart_ends_runs_in_flight_and_begins_afresh() -> None:
    world = World(3).start()
    run = world.running()
    world.done(0)
    world.restart()
    with pytest.raises(RankFailure, match=r"ranks 1-2 (was|were) restarted"):
        run.result(0)
    world.ranks[1].done()  # crosses the restart
    world.deliver()
    world.reap_doomed()
    assert [process.pid for process in world.ranks.values()] == [2000, 2001, 2002]
    assert world.core.state == "restarting"
    world.get_ready()
    again = world.running()
    world.wait(1.0)
    assert not again.done()
    world.done()
    assert again.result(0) == {0: 0, 1: 1, 2: 2}
    assert world.finished == {1: 1, 2: 1}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_restart_brings_dead_ranks_back(is_known: bool) -> None:
    world = World(2).start()
    world.reap(1)
    if is_known:
        world.wait(0.5)
    assert set(world.core.dead) == ({1} if is_known else set())
    world.restart()
    world.begin_again()
    world.wait(1.0)
    assert world.core.dead == {}
    run = world.running()
    world.done()
    assert run.result(0) == {0: 0, 1: 1}


# ---- ending


def test_a_stop_lets_ranks_leave_and_ends() -> None:
    world = World(2).start()
    run = world.running()
    world.stop()
    world.deliver()
    assert all(process.was_asked_to_leave for process in world.ranks.values())
    world.reap_doomed()
    assert world.ended == 1
    assert world.causes(Stopped) == [Stopped("stopped")]
    assert world.core.state == "ended"
    with pytest.raises(RankFailure, match="ended with"):
        run.result(0)


def test_a_stop_while_a_mesh_starts_ends_it() -> None:
    world = World(2)
    world.import_torch()
    world.stop()
    world.deliver()
    world.reap_doomed()
    assert world.core.state == "ended"
    assert world.causes(MeshReady) == []


def test_the_loss_of_the_agent_ends_every_run_and_each_later_one() -> None:
    world = World(2).start()
    runs = [world.submit(), world.running((1,))]
    world.done(0)
    world.lose_agent()
    assert world.core.state == "ended"
    for run, why in (*((run, "ended with") for run in runs), (world.submit(), "mesh is ended")):
        with pytest.raises(RankFailure, match=why):
            run.result(0)
