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
from tests.conftest import LEFTOVER_S, own_runtime_dir
from tests.faults.watching import wait_until

from .delay import delayed
from .netns import Host

WAIT_S = 60.0
LEASE_S = 2.0
# A lease that holds in a bad network, as the default does.
PATIENT_LEASE_S = 4.0
# By then a host that is cut would be lost.
ENOUGH_S = SILENT_S + HEARTBEAT_S + PATIENT_LEASE_S + 1.0
HOSTS = "cm1:2,cm2:2"
MODEL = """
import time, torch
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
batch = torch.ones(2, 64)
kept = rank + 5
"""
STEPS = {
    "idle": "",
    "Python": "time.sleep(0.01)",
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "FSDP2 backward": "model(batch).sum().backward()",
}
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
# An agent that hangs is, to the others, a host that is deaf and mute.
FAULTS = [(how, what) for how in ("cut", "deafen", "mute") for what in STEPS]
FAULTS.append(("freeze", "all_reduce"))
KEPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def _nothing_is_left(machines: list[Host]) -> Iterator[None]:
    """Meshes are shared by the tests of this module: what is left is looked for after each mesh."""
    yield
    for host in machines:
        host.mend()


@contextlib.contextmanager
def mesh_of(machines: list[Host], hosts: str, **options: object) -> Iterator[cm.Mesh]:
    others = [process for host in machines for process in host.meshes()]
    with own_runtime_dir():
        with cm.start(hosts=hosts, lease_s=60, **options) as mesh:  # type: ignore[arg-type]
            mesh.cell(MODEL)
            yield mesh
        for host in machines:
            own = [
                process
                for process in host.meshes()
                if process not in others and not set(others) & set(process.parents())
            ]
            _, left = psutil.wait_procs(own, timeout=LEFTOVER_S)
            assert not left, f"left on {host.name}: {left}"
            assert not files_of(mesh, host), f"files on {host.name}"


def files_of(mesh: cm.Mesh, host: Host) -> list[Path]:
    return list(host.directory.glob(f"run/cellmesh/{mesh.name}-*"))


@pytest.fixture(scope="module")
def mesh(request: pytest.FixtureRequest, machines: list[Host]) -> Iterator[cm.Mesh]:
    """A mesh with some lease of hosts, whose second host may be some seconds away."""
    lease_s, delay_s = request.param
    away = delayed(machines[1], delay_s) if delay_s else contextlib.nullcontext()
    with away, mesh_of(machines, HOSTS, host_lease_s=lease_s) as mesh:
        yield mesh


# One argument a mark: pytest would make the mesh again for each test of a joined one.
short_lease, patient, late = (
    pytest.mark.parametrize("mesh", [(lease_s, delay_s)], indirect=True, ids=[""])
    for lease_s, delay_s in ((LEASE_S, 0.0), (PATIENT_LEASE_S, 0.0), (PATIENT_LEASE_S, 0.2))
)


def lost_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def begin(mesh: cm.Mesh, what: str) -> None:
    """Have all ranks do something without end, and wait until they do."""
    if STEPS[what]:
        run = mesh.submit_cell(LOOP.format(step=STEPS[what]))
        states = mesh.rank_set.session.states
        wait_until(
            lambda: all(state.run == run.number for state in states(range(4)).values()),
            WAIT_S,
            "all ranks run",
        )


def end(mesh: cm.Mesh) -> None:
    for run in mesh.runs:
        run.interrupt()
        run.wait(WAIT_S)


def check_whole(mesh: cm.Mesh) -> None:
    """Check that ranks hold what they held, and that the model steps."""
    assert mesh.pull("kept").list == KEPT
    mesh.cell("x = torch.ones(1) * rank; dist.all_reduce(x); model(batch).sum().backward()")
    assert mesh.pull("float(x)").list == [6.0] * 4


@pytest.mark.parametrize("index", [0, 1])
def test_replaced_host_ends_when_its_cable_is_mended(index: int, machines: list[Host]) -> None:
    """The first host has the store; ranks that are cut off wait for the others in new groups.

    This comes before the tests that share a mesh, which would lose the same hosts.
    """
    lost, living = ((0, 1), [2, 3]) if index == 0 else ((2, 3), [0, 1])
    host = machines[index]
    others = host.meshes()
    with mesh_of(machines, "cm1:2,cm2:2", host_lease_s=1.0) as mesh:
        old = [process for process in host.meshes() if process not in others]
        cut_off = mesh[list(lost)].submit_cell("while True: dist.new_group()")
        host.cut()
        wait_until(lambda: lost_ranks(mesh) == set(lost), WAIT_S, "the host is lost")
        cut_off.wait(WAIT_S)
        assert mesh.heal(living[0], hosts="cm3:2").respawned == lost
        assert {mesh.report()[rank].host for rank in lost} == {"cm3"}
        host.mend()
        mesh.cell("group = dist.new_group(); x = torch.ones(1); dist.all_reduce(x, group=group)")
        assert mesh.pull("float(x)").list == [4.0] * 4
        _, left = psutil.wait_procs(old, timeout=WAIT_S)
        assert not left
        wait_until(lambda: not files_of(mesh, host), WAIT_S, "no files")
        assert mesh[living].pull("kept").list == [rank + 5 for rank in living]


@short_lease
@pytest.mark.parametrize(("how", "what"), FAULTS)
def test_host_that_is_not_heard_is_reported_then_lost_then_taken_back(
    how: str, what: str, mesh: cm.Mesh, machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    begin(mesh, what)
    said: list[str] = []

    def is_said(phrase: str) -> bool:
        said.append(capfd.readouterr().err)
        return phrase in "".join(said)

    began = time.monotonic()
    getattr(machines[1], how)()
    wait_until(lambda: is_said("cm2 (ranks 2-3) is not heard"), WAIT_S, "it is reported")
    # Before it counts as lost. That this takes at most 3 s follows from how often heartbeats are
    # sent (tests/core/wire/test_host.py), and benchmarks/hosts.py measures it: here the machine
    # may be busy with other tests.
    assert not lost_ranks(mesh)
    wait_until(lambda: lost_ranks(mesh) == {2, 3}, WAIT_S, "ranks 2-3 are lost")
    assert time.monotonic() - began > LEASE_S
    wait_until(lambda: is_said("cm2 (ranks 2-3) is lost"), WAIT_S, "the loss is reported")
    assert "".join(said).count("cm2 (ranks 2-3) is lost") == 1
    for run in mesh.runs:
        run.interrupt()
        run.wait(WAIT_S)
        assert {2, 3} <= set(run.failed_ranks())
    assert mesh[[0, 1]].pull("kept").list == KEPT[:2]
    with pytest.raises(CellmeshError, match=r"ranks 2-3.*%dist_heal"):
        mesh.cell("1")
    machines[1].mend()
    session = mesh.rank_set.session
    wait_until(lambda: session._hosts is not None and session._hosts.returned, WAIT_S, "cm2")
    assert mesh.heal().respawned == ()
    check_whole(mesh)


@short_lease
@pytest.mark.parametrize("what", STEPS)
def test_killed_host_costs_its_ranks_and_no_others(
    what: str, mesh: cm.Mesh, machines: list[Host]
) -> None:
    mesh.cell(MODEL)
    begin(mesh, what)
    machines[1].kill()
    wait_until(lambda: lost_ranks(mesh) == {2, 3}, WAIT_S, "ranks 2-3 are lost")
    end(mesh)
    assert mesh[[0, 1]].pull("kept").list == KEPT[:2]
    assert mesh.heal(0).respawned == (2, 3)
    assert mesh.pull("kept").list == [5, 6, 5, 5]


@patient
@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("how", ["30 % loss", "slow link"])
def test_bad_network_loses_nothing(
    how: str, what: str, mesh: cm.Mesh, machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    begin(mesh, what)
    if how == "slow link":
        machines[1].slow("1mbit")
    else:
        machines[1].lose(30)
    check_steps(mesh, what, capfd)
    machines[1].mend()
    end_whole(mesh, capfd)


@late
@pytest.mark.parametrize("what", STEPS)
def test_delay_of_200_ms_loses_nothing(
    what: str, mesh: cm.Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    begin(mesh, what)
    check_steps(mesh, what, capfd)
    end_whole(mesh, capfd)


def check_steps(mesh: cm.Mesh, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Check that ranks step on for longer than it takes to lose a host that is cut."""
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
    if STEPS[what]:
        wait_until(lambda: num_steps() > before, WAIT_S, "a further step")
        assert not mesh.runs[-1].done()
    assert not lost_ranks(mesh)
    assert "is lost" not in text


def end_whole(mesh: cm.Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    """Interrupt what runs, and check that no rank has been lost."""
    for run in mesh.runs:
        run.interrupt()
        run.wait(WAIT_S)
        assert run.failed_ranks() == [0, 1, 2, 3]  # KeyboardInterrupt, and nothing else
    check_whole(mesh)
    assert "is lost" not in capfd.readouterr().err
