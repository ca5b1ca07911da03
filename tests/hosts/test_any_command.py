"""Agents that other commands start: `ip netns exec` stands in for kubectl and docker."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import HostError

from .netns import Host

WITH_STDIN = "ip netns exec {host} {command}"
# What brings the file to the host: here, both have one file tree.
WITH_FILE = "sh -c 'test -f {ticket} && exec ip netns exec {host} {command} < /dev/null'"


@pytest.mark.parametrize("launch", [WITH_STDIN, WITH_FILE])
def test_ranks_run_where_a_command_has_started_agents(
    launch: str,
    machines: list[Host],
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cm.start(hosts="cm1:2,cm2:2", launch=launch) as mesh:
        mesh.cell("x = torch.ones(1) * rank; dist.all_reduce(x)")
        assert mesh.pull("float(x)").list == [6.0] * 4
        addresses = [agent.address for agent in mesh.rank_set.session.ticket.agents]
        assert addresses == [host.address for host in machines[:2]]
        secrets = [mesh.rank_set.session.ticket.key, mesh.rank_set.session.ticket.curve_secret]
        for process in psutil.Process().children(recursive=True):
            words = " ".join([*process.cmdline(), *process.environ().values()])
            assert not any(secret in words for secret in secrets)
        assert not list(tmp_path.glob("cellmesh-*"))


def test_command_that_fails_leaves_no_ticket(
    machines: list[Host], runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launch = "sh -c 'echo cannot copy {ticket} >&2; : {command}; exit 3'"
    with pytest.raises(HostError, match="cannot copy"):
        cm.start(hosts="cm1:2,cm2:2", launch=launch)
    assert not list(tmp_path.glob("cellmesh-*"))


def test_command_that_does_not_exist_leaves_no_ticket(
    machines: list[Host], runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(HostError, match="cm1: cannot run nosuch"):
        cm.start(hosts="cm1:2,cm2:2", launch="nosuch {ticket} {host} {command}")
    assert not list(tmp_path.glob("cellmesh-*"))
