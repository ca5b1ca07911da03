"""Ranks that die while idle, and those that replace them: who is told, what is copied."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.session.attach import attach
from cellmesh.magics.render.tables import status_table
from cellmesh.wire.status import RankInfo
from tests.conftest import check_nothing_left

from .conftest import Recorder

WAIT_S = 40.0
SUM = "t = torch.ones(1); dist.all_reduce(t)"


@pytest.fixture
def three(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Three ranks, each with a value of its own."""
    started = cm.start(3, name="three", lease_s=60)
    started.cell("value = rank")
    yield started
    started.stop()
    check_nothing_left(runtime_dir)


# A thread ends the rank between cells: once the run that started it has ended.
END_LATER = """
import os, threading
def end(after=threading.Event()):
    after.wait(0.3)
    os.write(2, b"last words of 1\\n")
    os.kill(os.getpid(), 9)
threading.Thread(target=end, daemon=True).start()
"""


def kill_idle(mesh: cm.Mesh, rank: int) -> None:
    """Kill a rank between cells, and wait until that is known."""
    pid = mesh.report()[rank].pid
    os.kill(pid, signal.SIGKILL)
    wait_for(mesh, lambda infos: infos[rank].pid != pid)


def wait_for(mesh: cm.Mesh, holds: Callable[[list[RankInfo]], bool]) -> None:
    for _ in range(20_000):
        if holds(list(mesh.report())):
            return
    raise AssertionError(mesh.report())


def wait_until_dead(mesh: cm.Mesh, rank: int) -> cm.RankDied:
    """Wait until the controller knows of a death; return the error of a call on that rank."""
    for _ in range(20_000):
        try:
            mesh[rank].run(int)
        except cm.RankDied as died:
            return died
        except cm.RankFailure:  # it was under way when the rank died
            continue
    raise AssertionError(f"the death of rank {rank} is not known")


def test_work_fills_a_new_rank_and_copies_never_overwrite_it(three: cm.Mesh) -> None:
    pid = three.report()[1].pid
    three[1].cell(END_LATER)
    wait_for(three, lambda infos: infos[1].pid != pid)
    died = wait_until_dead(three, 1)
    assert "last words of 1" in died.last_output
    assert "dist_heal" in str(died)
    assert "last words" not in str(died)  # which each refused cell would repeat
    assert "`%dist_status` shows its last lines" in str(died)
    shown = status_table("", three.report(), three.states())
    for text in (repr(shown), shown._repr_html_()):
        assert "dead: was killed by SIGKILL" in text
        assert "the last lines of rank 1:\n    last words of 1" in text
    assert three.heal().empty == (1,)
    assert three.heal().empty == (1,)  # nothing to heal, and still so
    assert "its predecessor was killed by SIGKILL" in repr(
        status_table("", three.report(), three.states())
    )
    three.cell("value = 10 + rank")
    assert "predecessor" not in repr(status_table("", three.report(), three.states()))
    kill_idle(three, 2)
    wait_until_dead(three, 2)
    assert three.heal(source=1).copied_to == (2,)
    assert three.pull("value").list == [10, 11, 11]


def test_an_empty_rank_is_filled_after_an_attach_as_well(
    three: cm.Mesh, recorder: Recorder
) -> None:
    kill_idle(three, 1)
    wait_until_dead(three, 1)
    three.heal()
    three.detach()
    again = attach("three")
    try:
        assert again.heal(source=0).copied_to == (1,)
        assert again.pull("value").list == [0, 0, 2]
        again.submit_cell(SUM, sink=recorder).result(WAIT_S)
        assert recorder.notes == []
    finally:
        again.stop()


def test_auto_heal_replaces_an_idle_rank_and_the_next_cell_says_so(
    runtime_dir: Path, recorder: Recorder
) -> None:
    with cm.start(2, auto_heal=True) as mesh:
        mesh.cell("value = rank")
        kill_idle(mesh, 1)
        wait_for(mesh, lambda infos: infos[1].phase == "idle" and infos[1].predecessor_ending != "")
        assert "new and empty: its predecessor was killed by SIGKILL" in repr(
            status_table("", mesh.report(), mesh.states())
        )
        run = mesh.submit_cell(f"{SUM}\nvalue", sink=recorder)
        with pytest.raises(cm.RankFailure, match="NameError"):
            run.result(WAIT_S)
        told = (
            "rank 1 was killed by SIGKILL; it is new and empty "
            "(`%dist_heal --from 0` copies from a rank)"
        )
        assert recorder.notes[0] == told
        assert mesh.heal(source=0).copied_to == (1,)
        mesh.submit_cell(f"{SUM}\nvalue", sink=recorder).result(WAIT_S)
        assert recorder.notes.count(told) == 1
        assert mesh.pull("(value, t.item())").list == [(0, 2.0), (0, 2.0)]
    check_nothing_left(runtime_dir)


def test_a_second_rank_that_dies_while_the_first_is_replaced(three: cm.Mesh) -> None:
    pids = [info.pid for info in three.report()]
    kill_idle(three, 1)
    wait_until_dead(three, 1)
    outcomes: list[object] = []

    def heal() -> None:
        try:
            outcomes.append(three.heal())
        except cm.CellmeshError as error:
            outcomes.append(error)

    healing = threading.Thread(target=heal)
    healing.start()
    os.kill(pids[2], signal.SIGKILL)
    healing.join(WAIT_S)
    assert not healing.is_alive()
    assert len(outcomes) == 1
    wait_for(three, lambda infos: infos[2].pid != pids[2])  # the agent knows; does the controller?
    three.heal()
    three.cell(SUM)
    assert three.pull("t.item()").list == [3.0] * 3
    assert three[0].pull("value") == 0
    assert three.report()[0].pid == pids[0]
