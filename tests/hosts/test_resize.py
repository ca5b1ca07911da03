"""A mesh on hosts that join and leave, with a model whose shards a checkpoint carries over."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller import resizing as resize
from cellmesh.controller.code_files.sync import CodeSync
from cellmesh.controller.session.hosts.connections import Connections
from cellmesh.errors import HostError, MeshUsageError
from tests.faults.watching import wait_until

from .netns import Host

WAIT_S = 60.0

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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hosts": "nosuch.invalid:1"}, HostError, r"nosuch\.invalid: .*resolve"),
        ({"hosts": "cm1:1"}, MeshUsageError, "cm1 has ranks of the mesh"),
        ({"hosts": "10.77.3.1:1"}, MeshUsageError, r"10\.77\.3\.1 is cm1, which has ranks"),
    ],
)
def test_host_that_cannot_join_is_named(
    options: dict[str, str],
    error: type[Exception],
    message: str,
    machines: list[Host],
    runtime_dir: Path,
) -> None:
    with cm.start(hosts="cm1:1") as mesh:
        with pytest.raises(error, match=f"(?s){message}"):
            mesh.resize(**options)
        assert mesh.pull("rank").list == [0]


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


def check_as_before(mesh: cm.Mesh, joins: Host) -> None:
    """Check that a mesh goes on with one rank, and that nothing is left on the host of another."""
    assert mesh.pull("kept").list == [5]
    assert mesh.ranks == (0,)
    mesh.cell("kept = kept + beside.VALUE")
    wait_until(lambda: not joins.meshes(), WAIT_S, "the agent has ended")
    assert not joins.shell(f"find {joins.directory}/run -path '*/cellmesh/*'")


def check_resize(mesh: cm.Mesh, options: dict[str, str]) -> None:
    """Check that a host joins in the end."""
    mesh.resize(**options)  # type: ignore[arg-type]
    mesh.cell("import beside; x = torch.ones(1); dist.all_reduce(x)")
    assert mesh.pull("(beside.VALUE, x.item())").list == [(1, 2.0)] * 2
    assert mesh[0].pull("kept") == 6


def test_host_with_a_full_disk_does_not_join(
    module: Path, machines: list[Host], runtime_dir: Path
) -> None:
    small = machines[1].directory / "run"
    with cm.start(hosts="cm1:1", preload="beside") as mesh:
        mesh.cell("import beside; kept = rank + 5")
        machines[1].shell(f"mount -t tmpfs -o size=2m,mode=700 tmpfs {small}")
        try:
            message = r"(?s)cm2: cannot write .* No space left.*cm2 did not join: the mesh is as it"
            with pytest.raises(HostError, match=message):
                mesh.resize(hosts="cm2:1")
            check_as_before(mesh, machines[1])
        finally:
            machines[1].shell(f"umount -l {small}")
        check_resize(mesh, {"hosts": "cm2:1"})


@pytest.mark.parametrize("what", ["time-out", "interrupt", "agent killed"])
def test_host_that_does_not_answer_does_not_join(
    what: str,
    module: Path,
    machines: list[Host],
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent stops before it has the modules."""
    bring, hosts = CodeSync.bring, list[Connections]()

    def interrupt() -> None:
        wait_until(lambda: bool(hosts[0]._replies), WAIT_S, "files are offered")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def stop_first(code: CodeSync, *args: Any, **options: Any) -> None:
        machines[1].freeze()
        thread = threading.Thread(target=interrupt if what == "interrupt" else machines[1].kill)
        if what != "time-out":
            thread.start()
        bring(code, *args, **options)

    with cm.start(hosts="cm1:1", preload="beside", host_lease_s=2) as mesh:
        mesh.cell("import beside; kept = rank + 5")
        expected: dict[str, tuple[type[BaseException], str]] = {
            "time-out": (HostError, "(?s)cm2: no answer about the files .*cm2 did not join"),
            "interrupt": (KeyboardInterrupt, "^$"),
            "agent killed": (HostError, "(?s)cm2 cannot be used: its agent .*cm2 did not join"),
        }
        hosts.append(mesh.rank_set.session._hosts)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(CodeSync, "bring", stop_first)
            if what == "time-out":
                patch.setattr(resize, "FILES_S", 2.0)
            error, message = expected[what]
            with pytest.raises(error, match=message):
                mesh.resize(hosts="cm2:1")
        machines[1].mend()
        check_as_before(mesh, machines[1])
        check_resize(mesh, {"hosts": "cm2:1"})
