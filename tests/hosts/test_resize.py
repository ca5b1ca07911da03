"""A mesh on hosts that join and leave, with a model whose shards a checkpoint carries over."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

import cellmesh as cm
from cellmesh.controller.code_files.sync import CodeSync
from cellmesh.controller.session.hosts.connections import Connections
from cellmesh.errors import HostError
from tests.faults.watching import wait_until

from .netns import Host

FORKS_AGENTS = True
WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x)"

MODEL = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(world_size)
model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 2))
model = fully_shard(model, mesh=mesh)  # sharded on each host, replicated across
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
"""
STEP = """
for _ in range(3):
    optimizer.zero_grad()
    loss = (model(torch.ones(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
loss = loss.item()
"""
HOSTS = {4: ["cm1", "cm1", "cm2", "cm2"], 6: ["cm1", "cm1", "cm2", "cm2", "cm3", "cm3"]}
HOSTS[2] = ["cm1", "cm1"]


def test_hosts_join_and_leave_with_a_model(
    machines: list[Host], runtime_dir: Path, tmp_path: Path
) -> None:
    """From 2 x 2 ranks to 3 x 2, and to 1 x 2: the model trains on as if it had stayed."""
    losses = []
    with cm.start(hosts="cm1:2,cm2:2", mesh="host=2,gpu=2", lease_s=60) as mesh:
        mesh.cell(f"kept = rank + 5\n{MODEL}{STEP}")
        losses.append(mesh.pull("loss").list)
        pids = [info.pid for info in mesh.report()]
        for size, options in ((6, {"hosts": "cm3:2"}), (2, {})):
            mesh.save("model", "optimizer", path=tmp_path / "run")
            report = mesh.resize(size, mesh=f"host={size // 2},gpu=2", **options)
            assert any("model, optimizer" in note for note in report.notes)
            assert [info.host for info in mesh.report()] == HOSTS[size]
            assert [info.pid for info in mesh.report()][:2] == pids[:2]
            assert mesh[[0, 1]].pull("kept").list == [5, 6]
            mesh.cell(MODEL)
            mesh.load("model", "optimizer", path=tmp_path / "run")
            mesh.cell(STEP)
            losses.append(mesh.pull("loss").list)
    assert all(len(set(each)) == 1 for each in losses)
    firsts = [each[0] for each in losses]
    assert firsts == sorted(firsts, reverse=True)  # it goes on, and does not begin again


@pytest.fixture
def module(
    machines: list[Host], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A module beside the notebook, which no other host has."""
    directory = machines[0].project / request.node.name.partition("[")[0]
    directory.mkdir(exist_ok=True)
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    path = directory / "beside.py"
    path.write_text("VALUE = 1\n" + "#" * 3_000_000)
    return path


@pytest.mark.parametrize("what", ["interrupt", "agent killed"])
def test_host_that_does_not_answer_does_not_join(
    what: str,
    module: Path,
    machines: list[Host],
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent stops before it has the modules."""
    bring, hosts = CodeSync.bring, list[Connections]()
    joins = machines[1]

    def interrupt() -> None:
        wait_until(lambda: bool(hosts[0]._replies), WAIT_S, "files are offered")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def stop_first(code: CodeSync, *args: Any, **options: Any) -> None:
        joins.freeze()
        threading.Thread(target=interrupt if what == "interrupt" else joins.kill).start()
        bring(code, *args, **options)

    with cm.start(hosts="cm1:1", preload="beside", host_lease_s=2) as mesh:
        mesh.cell("import beside; kept = rank + 5")
        expected: dict[str, tuple[type[BaseException], str]] = {
            "interrupt": (KeyboardInterrupt, "^$"),
            "agent killed": (HostError, "(?s)cm2 cannot be used: without .*cm2 did not join"),
        }
        hosts.append(mesh.rank_set.session._hosts)  # type: ignore[arg-type]
        error, message = expected[what]
        with monkeypatch.context() as patch:
            patch.setattr(CodeSync, "bring", stop_first)
            with pytest.raises(error, match=message):
                mesh.resize(hosts="cm2:1")
        joins.mend()
        assert mesh.pull("kept").list == [5]
        wait_until(lambda: not joins.meshes(), WAIT_S, "the agent has ended")
        assert not joins.shell(f"find {joins.directory}/run -path '*/cellmesh/*'")
        mesh.resize(hosts="cm2:1")
        mesh.cell("import beside; x = torch.ones(1); dist.all_reduce(x)")
        assert mesh.pull("(beside.VALUE, x.item())").list == [(1, 2.0)] * 2
        assert mesh[0].pull("kept") == 5


# ---- the c10d store is made again wherever its hosts are lost, or leave the mesh


def dead_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def test_store_is_made_again_when_two_hosts_are_lost_at_once(
    machines: list[Host], runtime_dir: Path
) -> None:
    hosts = "cm1:1,cm2:1,cm3:1,cm4:1"
    with cm.start(hosts=hosts, lease_s=20, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        for machine in machines[:2]:
            machine.cut()
        wait_until(lambda: dead_ranks(mesh) == {0, 1}, WAIT_S, "both are lost")
        assert mesh[[2, 3]].pull("kept").list == [7, 8]
        for machine in machines[:2]:
            machine.mend()
            machine.kill()
        assert mesh.heal().respawned == (0, 1)
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [10.0] * 4
        assert mesh[[2, 3]].pull("kept").list == [7, 8]


def test_host_that_is_lost_again_while_it_is_taken_back_is_started(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1", lease_s=20, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        hosts = cast(Connections, mesh.rank_set.session._hosts)
        machines[0].cut()
        wait_until(lambda: dead_ranks(mesh) == {0}, WAIT_S, "cm1 is lost")
        machines[0].mend()
        wait_until(lambda: hosts.returned == {0}, WAIT_S, "cm1 is heard again")
        machines[0].freeze()
        with ThreadPoolExecutor(1) as pool:
            heal = pool.submit(mesh.heal)
            wait_until(lambda: not hosts.lost, WAIT_S, "cm1 is taken back")
            machines[0].kill()
            assert heal.result(WAIT_S).respawned == (0,)
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 2
        assert mesh[1].pull("kept") == 6


def test_store_on_a_host_that_leaves_is_made_again(machines: list[Host], runtime_dir: Path) -> None:
    with cm.start(hosts="cm1:1,cm2:2", lease_s=20, host_lease_s=2) as mesh:
        machines[0].kill()
        wait_until(lambda: dead_ranks(mesh) == {0}, WAIT_S, "cm1 is lost")
        assert mesh.heal().respawned == (0,)  # the store is on cm2 now
        mesh.cell(f"kept = rank + 5; {REDUCE}")
        mesh.resize(1)
        mesh.cell(REDUCE)
        assert mesh.pull("kept").list == [5]
        mesh.resize(hosts="cm3:1")
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 2


def test_restart_is_refused_while_a_host_is_not_heard(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1", lease_s=20, host_lease_s=4) as mesh:
        mesh.cell("kept = rank + 5")
        machines[1].cut()
        infos = mesh.report()  # which waits until the host is reported
        assert [info.is_heard for info in infos] == [True, False]
        with pytest.raises(HostError, match=r"lost or not heard: cm2.*dist_heal.*dist_resize N"):
            mesh.restart()
        wait_until(lambda: dead_ranks(mesh) == {1}, WAIT_S, "cm2 is lost")
        with pytest.raises(HostError, match=r"lost or not heard: cm2.*dist_heal.*dist_resize N"):
            mesh.restart()
        assert mesh[0].pull("kept") == 5
        machines[1].mend()
        machines[1].kill()
        mesh.heal()
        mesh.restart()
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [3.0] * 2
