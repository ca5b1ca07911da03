"""Both sides of a mesh in memory: from its start over restarts to its end."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.errors import RankFailure
from cellmesh.wire.messages import MeshReady, StartFailed, Stopped

from ..support.scripted import World


def causes(world: World, kind: type) -> list[Any]:
    return [change.cause for change in world.changes if isinstance(change.cause, kind)]


# ---- starting


def test_start_of_a_mesh_reports_its_progress() -> None:
    world = World(3).start()
    assert [change.state for change in world.changes][-1] == "ready"
    stages = [getattr(change.cause, "stage", "") for change in world.changes]
    assert stages == ["", "importing torch", "forking ranks", *["process group"] * 3, ""]
    [ready] = causes(world, MeshReady)
    assert [(info.rank, info.pid, info.phase) for info in ready.ranks] == [
        (rank, 1000 + rank, "idle") for rank in range(3)
    ]
    assert world.core.mesh.ranks == ready.ranks


def test_a_mesh_is_not_ready_before_its_last_rank() -> None:
    world = World(2)
    world.import_torch()
    world.ranks[1].ready()
    world.deliver()
    assert world.core.state == "starting"
    world.ranks[0].ready()
    world.deliver()
    assert world.core.state == "ready"


def test_a_rank_that_dies_while_it_starts_fails_the_start() -> None:
    world = World(3)
    world.import_torch()
    world.reap(1, "exited with code 1", "ImportError: no")
    world.deliver()
    [failed] = causes(world, StartFailed)
    assert failed.fault == "host"
    assert "rank 1 exited with code 1 while it started\nImportError: no" in failed.text
    assert world.ended == 0
    world.reap_doomed()
    assert world.ended == 1
    assert world.core.state == "ended"


# ---- restarting


def test_a_restart_ends_runs_in_flight_and_begins_afresh() -> None:
    world = World(3).start()
    run = world.submit()
    world.deliver()
    world.ranks[0].done()
    world.wait(0.01)
    world.restart()
    assert run.done()
    with pytest.raises(RankFailure, match=r"ranks 1-2 (was|were) restarted"):
        run.result(0)
    world.deliver()
    world.reap_doomed()
    assert {rank: process.pid for rank, process in world.ranks.items()} == {
        0: 2000,
        1: 2001,
        2: 2002,
    }
    assert world.core.state == "restarting"
    world.get_ready()
    assert world.core.state == "ready"
    again = world.submit()
    world.deliver()
    for rank in range(3):
        world.ranks[rank].done(rank)
    world.wait(0.01)
    assert again.result(0) == {0: 0, 1: 1, 2: 2}


def test_messages_of_replaced_ranks_end_no_new_run() -> None:
    world = World(2).start()
    world.submit()
    world.deliver()
    world.restart()
    world.ranks[0].done()
    world.deliver()
    world.reap_doomed()
    world.get_ready()
    run = world.submit()
    world.wait(1.0)
    assert not run.done()
    assert world.finished == {1: 1}


def test_a_death_that_crosses_a_restart_does_not_haunt_the_new_rank() -> None:
    world = World(1).start()
    world.reap(0)
    world.restart()
    world.deliver()
    world.get_ready()
    assert world.core.state == "ready"
    world.wait(1.0)
    assert world.core.dead == {}
    run = world.submit()
    world.deliver()
    world.ranks[0].done(5)
    world.wait(0.01)
    assert run.result(0) == {0: 5}


def test_a_restart_brings_dead_ranks_back() -> None:
    world = World(2).start()
    world.reap(1)
    world.wait(0.5)
    assert set(world.core.dead) == {1}
    world.restart()
    world.deliver()
    world.reap_doomed()
    world.get_ready()
    assert world.core.dead == {}
    assert sorted(world.ranks) == [0, 1]


# ---- ending


def test_a_stop_lets_ranks_leave_and_ends() -> None:
    world = World(2).start()
    run = world.submit()
    world.deliver()
    world.stop()
    world.deliver()
    assert all(process.was_asked_to_leave for process in world.ranks.values())
    world.reap_doomed()
    assert world.ended == 1
    assert causes(world, Stopped) == [Stopped("stopped")]
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
    assert causes(world, MeshReady) == []


def test_the_loss_of_the_agent_ends_every_run() -> None:
    world = World(2).start()
    runs = [world.submit(), world.submit((1,))]
    world.deliver()
    world.ranks[0].done()
    world.wait(0.01)
    world.lose_agent()
    for run in runs:
        with pytest.raises(RankFailure, match="ended with"):
            run.result(0)
    assert world.core.state == "ended"


def test_a_run_on_an_ended_mesh_ends_at_once() -> None:
    world = World(2).start()
    world.lose_agent()
    run = world.submit()
    with pytest.raises(RankFailure, match="the mesh is ended"):
        run.result(0)
