"""The ``cellmesh`` command on real processes: what it lists, ends, sweeps and leaves alone."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.conftest import check_nothing_left, process_named, stop_process

WAIT_S = 40.0


def cellmesh(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, as a terminal does."""
    command = [sys.executable, "-m", "cellmesh", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def listed() -> list[dict[str, Any]]:
    done = cellmesh("ps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    meshes: list[dict[str, Any]] = json.loads(done.stdout)
    return meshes


def ended(pidfds: Iterable[int], timeout_s: float = WAIT_S) -> bool:
    """Whether these processes end in time."""
    deadline = time.monotonic() + timeout_s
    return all(
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0] for pidfd in pidfds
    )


@pytest.fixture
def train(runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Two ranks named ``train``."""
    mesh = cm.start(2, mesh={"dp": 2, "tp": 1}, name="train")
    yield mesh
    mesh.stop()


@pytest.fixture
def pidfds(train: cm.Mesh) -> Iterator[dict[int, int]]:
    """Pidfds of all processes of ``train``."""
    [mesh] = listed()
    opened = {pid: os.pidfd_open(pid) for pid in mesh["pids"]}
    yield opened
    for number in opened.values():
        os.close(number)


def test_ps_lists_a_mesh_and_stop_ends_it(
    train: cm.Mesh, pidfds: dict[int, int], runtime_dir: Path
) -> None:
    ticket = read_ticket(runtime_root() / "train" / "ticket.json")
    [mesh] = listed()
    assert (mesh["name"], mesh["state"]) == ("train", "running")
    assert (mesh["num_ranks"], mesh["mesh"]) == (2, {"dp": 2, "tp": 1})
    assert (mesh["agent_pid"], mesh["controller_pid"]) == (ticket.agent_pid, os.getpid())
    assert mesh["pids"][0] == ticket.agent_pid
    assert {info.pid for info in train.report()} < set(mesh["pids"])
    assert 50e6 < mesh["memory_bytes"] < 2e9
    assert 0 < mesh["age_s"] < 120

    shown = cellmesh("ps").stdout
    row = ["train", "running", "2", "dp=2,tp=1", str(ticket.agent_pid), str(os.getpid())]
    assert shown.splitlines()[1].split()[:6] == row
    assert ticket.key not in shown + json.dumps(mesh)

    missed = cellmesh("stop", "trian")
    assert missed.returncode == 1
    assert "there is no mesh 'trian'; did you mean 'train'? (running: train)" in missed.stderr
    assert train.run(lambda: 1) == {0: 1, 1: 1}

    stopped = cellmesh("stop", "train")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith(f"stopped train: 2 ranks, {len(pidfds)} processes, ")
    assert ended(pidfds.values(), timeout_s=0)
    check_nothing_left(runtime_dir)
    assert cellmesh("ps").stdout == "no mesh is running\n"
    assert listed() == []


def test_an_agent_that_hangs_is_killed_with_all_below_it(train: cm.Mesh, runtime_dir: Path) -> None:
    # In a session of its own, so that no signal to a process group reaches it.
    started = train[1].run(_start_in_session_of_its_own)
    [mesh] = listed()
    assert started in mesh["pids"]
    watched = [os.pidfd_open(pid) for pid in mesh["pids"]]
    try:
        stop_process(mesh["agent_pid"])
        done = cellmesh("stop", "train")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("killed train: 2 ranks")
        assert ended(watched, timeout_s=0)
    finally:
        for number in watched:
            os.close(number)


def _start_in_session_of_its_own() -> int:
    import subprocess

    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def test_ps_sweeps_what_three_kills_leave(
    train: cm.Mesh, pidfds: dict[int, int], runtime_dir: Path
) -> None:
    directory = runtime_root() / "train"
    agent, zygote = _agent_and_zygote(pidfds)
    # Guardian and zygote first, as they would tidy up when the agent goes; which is not to replace
    # them.
    process_named(runtime_dir, "cellmesh-guard").kill()
    stop_process(agent)
    os.kill(zygote, signal.SIGKILL)
    assert ended([pidfds[zygote]])
    os.kill(agent, signal.SIGKILL)
    assert ended(pidfds.values())
    assert directory.exists()

    done = cellmesh("ps")
    assert done.stdout == "no mesh is running\n"
    assert (
        done.stderr
        == f"train is dead (its agent, process {agent}, has gone): removed {directory}\n"
    )
    assert not directory.exists()
    assert listed() == []


def _agent_and_zygote(pidfds: dict[int, int]) -> tuple[int, int]:
    names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in pidfds}
    return names["cellmesh-agent"], names["cellmesh-zygote"]


# ---- doctor


def test_doctor_starts_a_mesh_and_leaves_nothing(runtime_dir: Path) -> None:
    done = cellmesh("doctor", "--json", "--ranks", "1")
    told = json.loads(done.stdout)
    findings = {finding["title"]: finding for finding in told["findings"]}
    problems = [finding for finding in told["findings"] if finding["status"] == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert findings["a real mesh"]["status"] == "ok", findings["a real mesh"]
    assert findings["torch"]["status"] != "problem"
    assert findings["a real mesh"]["text"].startswith("2 ranks with ")
    assert told["version"] == cm.__version__
