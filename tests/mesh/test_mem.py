"""What ranks say of their memory."""

from __future__ import annotations

import pytest

import cellmesh as cm
from cellmesh.wire.status import MemoryUse

from .conftest import Recorder, state_of


def use_of(mesh: cm.Mesh, rank: int = 0) -> MemoryUse:
    return state_of(mesh, rank).memory


def test_a_cells_change_is_seen_and_its_peak(mesh: cm.Mesh) -> None:
    mesh.cell("kept = torch.ones(10_000_000) if rank == 0 else None")
    kept, other = use_of(mesh, 0), use_of(mesh, 1)
    assert 35e6 < kept.cell_rss < 80e6
    assert other.cell_rss < 20e6
    assert kept.peak_rss >= kept.rss > 0
    mesh.cell("kept = None\nbrief = torch.ones(50_000_000)\ndel brief")
    after = use_of(mesh, 0)
    assert after.cell_rss < -30e6
    assert after.cell_peak_rss > 100e6
    assert after.peak_rss >= kept.peak_rss + after.cell_peak_rss - 1e6
    assert after.execution_count == kept.execution_count + 1


def test_calls_are_no_cells(mesh: cm.Mesh) -> None:
    mesh.cell("pass")
    before = use_of(mesh)
    mesh.run(len, [])
    mesh.pull("rank")
    after = use_of(mesh)
    assert after.execution_count == before.execution_count
    assert after.cell_rss == before.cell_rss


def test_failed_cell_is_reported_too(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure):
        mesh.cell("kept = torch.ones(10_000_000)\n1 / 0")
    assert 35e6 < use_of(mesh).cell_rss < 80e6


def test_running_cell_is_reported_as_of_now(mesh: cm.Mesh, recorder: Recorder) -> None:
    run = mesh.submit_cell(
        "import time\nheld = torch.ones(10_000_000)\nprint('here')\ntime.sleep(60)", sink=recorder
    )
    recorder.wait_for_line("here")
    try:
        state = state_of(mesh, 0)
    finally:
        run.interrupt()
        assert run.wait(20.0)
    assert state.execution_count == state.memory.execution_count
    assert 35e6 < state.memory.cell_rss < 80e6
