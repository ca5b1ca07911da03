"""A mesh on hosts that join and leave, with a model whose shards a checkpoint carries over."""

from __future__ import annotations

from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import HostError, MeshUsageError

from .netns import Host

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
