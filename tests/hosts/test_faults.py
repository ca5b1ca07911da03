"""Hosts that cannot be reached, against what their ranks do: what is lost, and what comes back."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from cellmesh.wire.hosts import HEARTBEAT_S, SILENT_S
from tests.faults.watching import wait_until

from .netns import Host

FORKS_AGENTS = True
WAIT_S = 60.0
LEASE_S = 2.0
# A lease that holds in a bad network, as the default does.
PATIENT_LEASE_S = 4.0
# By then a host that is cut would be lost.
ENOUGH_S = SILENT_S + HEARTBEAT_S + PATIENT_LEASE_S + 1.0
MODEL = """
import time, torch
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
batch = torch.ones(2, 64)
kept = rank + 5
"""
IDLE, PYTHON, ALL_REDUCE, BACKWARD = (
    "",
    "time.sleep(0.01)",
    "dist.all_reduce(torch.ones(4))",
    "model(batch).sum().backward()",
)
# Rank 3, on the second host, says once a second how many steps it has made.
LOOP = """
steps, said = 0, time.monotonic()
while True:
    {step}
    steps += 1
    if rank == 3 and time.monotonic() > said + 1:
        print("step", steps)
        said = time.monotonic()
"""
KEPT = [5, 6, 7, 8]

pytestmark = pytest.mark.timeout(180)


@contextlib.contextmanager
def mesh_of(lease_s: float) -> Iterator[cm.Mesh]:
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, host_lease_s=lease_s) as mesh:
        mesh.cell(MODEL)
        yield mesh


def lost_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def begin(mesh: cm.Mesh, step: str) -> None:
    """Have all ranks do something without end, and wait until they do."""
    if step:
        run = mesh.submit_cell(LOOP.format(step=step))
        states = mesh.rank_set.session.states
        wait_until(
            lambda: all(state.run == run.number for state in states(range(4)).values()),
            WAIT_S,
            "all ranks run",
        )


def end(mesh: cm.Mesh, failed: set[int]) -> None:
    for run in mesh.runs:
        run.interrupt()
        run.wait(WAIT_S)
        assert failed <= set(run.failed_ranks())


def check_whole(mesh: cm.Mesh) -> None:
    """Check that ranks hold what they held, and that the model steps."""
    assert mesh.pull("kept").list == KEPT
    mesh.cell("x = torch.ones(1) * rank; dist.all_reduce(x); model(batch).sum().backward()")
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_replaced_host_ends_when_its_cable_is_mended(
    machines: list[Host], runtime_dir: Path
) -> None:
    """The first host, which has the store; ranks that are cut off wait for the others in groups."""
    host = machines[0]
    with mesh_of(1.0) as mesh:
        old = host.meshes()
        cut_off = mesh[[0, 1]].submit_cell("while True: dist.new_group()")
        host.cut()
        wait_until(lambda: lost_ranks(mesh) == {0, 1}, WAIT_S, "the host is lost")
        cut_off.wait(WAIT_S)
        assert mesh.heal(2, hosts="cm3:2").respawned == (0, 1)
        assert {mesh.report()[rank].host for rank in (0, 1)} == {"cm3"}
        host.mend()
        mesh.cell("group = dist.new_group(); x = torch.ones(1); dist.all_reduce(x, group=group)")
        assert mesh.pull("float(x)").list == [4.0] * 4
        _, left = psutil.wait_procs(old, timeout=WAIT_S)
        assert not left
        wait_until(lambda: not list(host.directory.glob("run/cellmesh/*")), WAIT_S, "no files")
        assert mesh[[2, 3]].pull("kept").list == KEPT[2:]


def test_host_that_is_not_heard_is_reported_then_lost_then_taken_back(
    machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # An agent that hangs is, to the others, a host that is deaf and mute.
    faults = {"cut": BACKWARD, "deafen": IDLE, "mute": PYTHON, "freeze": ALL_REDUCE}
    with mesh_of(LEASE_S) as mesh:
        session = mesh.rank_set.session
        for how, step in faults.items():
            begin(mesh, step)
            capfd.readouterr()
            said = ""
            began = time.monotonic()
            getattr(machines[1], how)()

            def is_said(phrase: str) -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return phrase in said

            wait_until(lambda: is_said("cm2 (ranks 2-3) is not heard"), WAIT_S, f"report: {how}")
            # Before it counts as lost. That this takes at most 3 s follows from how often
            # heartbeats are sent (tests/core/wire/test_host.py): here the machine may be busy.
            assert not lost_ranks(mesh)
            wait_until(lambda: lost_ranks(mesh) == {2, 3}, WAIT_S, f"ranks 2-3 are lost: {how}")
            assert time.monotonic() - began > LEASE_S
            wait_until(lambda: is_said("cm2 (ranks 2-3) is lost"), WAIT_S, f"loss: {how}")
            assert said.count("cm2 (ranks 2-3) is lost") == 1
            end(mesh, {2, 3})
            assert mesh[[0, 1]].pull("kept").list == KEPT[:2]
            with pytest.raises(CellmeshError, match=r"ranks 2-3.*%dist_heal"):
                mesh.cell("1")
            machines[1].mend()
            wait_until(lambda: session._hosts and session._hosts.returned, WAIT_S, "cm2 is back")
            assert mesh.heal().respawned == ()
            check_whole(mesh)


def test_killed_host_costs_its_ranks_and_no_others(machines: list[Host], runtime_dir: Path) -> None:
    with mesh_of(LEASE_S) as mesh:
        for step in (IDLE, BACKWARD):
            mesh.cell(MODEL)
            begin(mesh, step)
            machines[1].kill()
            wait_until(lambda: lost_ranks(mesh) == {2, 3}, WAIT_S, f"ranks 2-3 are lost: {step}")
            end(mesh, {2, 3})
            assert mesh[[0, 1]].pull("kept").list == KEPT[:2]
            assert mesh.heal(0).respawned == (2, 3)
            assert mesh.pull("kept").list == [5, 6, 5, 5]


@pytest.mark.parametrize("how", ["30 % loss", "slow link"])
def test_bad_network_loses_nothing(
    how: str, machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks step on for longer than it takes to lose a host that is cut."""
    with mesh_of(PATIENT_LEASE_S) as mesh:
        begin(mesh, BACKWARD)
        if how == "slow link":
            machines[1].slow("1mbit")
        else:
            machines[1].lose(30)
        text = ""

        def num_steps() -> int:
            nonlocal text
            text += "".join(capfd.readouterr())
            return max(map(int, re.findall(r"step (\d+)", text)), default=0)

        until = time.monotonic() + ENOUGH_S
        wait_until(lambda: time.monotonic() > until, WAIT_S, "a cut host would be lost")
        before = num_steps()
        states = mesh.rank_set.session.states
        wait_until(lambda: states([2, 3]).keys() == {2, 3}, WAIT_S, "the host answers")
        wait_until(lambda: num_steps() > before, WAIT_S, "a further step")
        assert not mesh.runs[-1].done()
        assert not lost_ranks(mesh)
        machines[1].mend()
        end(mesh, {0, 1, 2, 3})  # by KeyboardInterrupt, and nothing else
        check_whole(mesh)
        num_steps()
        assert "is lost" not in text
