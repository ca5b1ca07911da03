"""What the end of a mesh says of hosts that do not hear it, and what ends it there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from cellmesh.wire.ticket import runtime_root
from tests.conftest import LEFTOVER_S
from tests.faults.watching import wait_until

from .netns import Host
from .notebook import here

FORKS_AGENTS = True
WAIT_S = 60.0


def check_named_and_ended(host: Host, said: str) -> None:
    """The host is named, keeps its ranks, and is ended by `cellmesh stop` once it is reached."""
    assert f"left may live on: {host.name} (tcp://{host.address}:" in said
    assert "for up to 10 min" in said
    assert "`cellmesh stop left` ends them" in said
    kept = host.meshes()
    assert kept
    refused = here("stop", "left")
    assert refused.returncode == 1
    assert f"left may live on: {host.name} " in refused.stderr
    host.mend()
    stopped = here("stop", "left")
    assert stopped.returncode == 0, stopped.stderr
    _, left = psutil.wait_procs(kept, timeout=LEFTOVER_S)
    assert not left
    assert not (runtime_root() / "left").exists()


def test_host_that_is_cut_off_is_named_and_can_be_ended_later(
    machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = cm.start(hosts="cm1:1,cm2:1", lease_s=600, name="left")
    machines[1].cut()
    run = mesh[1].submit(abs, -1)
    mesh.stop()
    with pytest.raises(CellmeshError):
        run.result(WAIT_S)
    assert not machines[0].meshes()
    check_named_and_ended(machines[1], capfd.readouterr().err)


def test_host_that_another_has_replaced_is_named_and_can_be_ended_later(
    machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = cm.start(hosts="cm1:1,cm2:1", lease_s=600, host_lease_s=1.0, name="left")
    machines[1].cut()
    wait_until(lambda: mesh.rank_set.session.dead_ranks == {1}, WAIT_S, "cm2 is lost")
    report = mesh.heal(hosts="cm3:1")
    assert report.respawned == (1,)
    mesh.stop()
    assert not machines[2].meshes()
    check_named_and_ended(machines[1], capfd.readouterr().err)
