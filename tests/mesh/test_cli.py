"""The ``cellmesh`` command on real processes: what it lists, ends, sweeps and leaves alone."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cellmesh as cm
from cellmesh.wire.host import Place
from cellmesh.wire.own_file import to_json
from cellmesh.wire.ticket import (
    Ticket,
    make_directory,
    new_key,
    read_ticket,
    runtime_root,
    write_ticket,
)
from tests.conftest import check_nothing_left, process_named, stop_process

WAIT_S = 40.0


# Lowers the limit, then becomes the command that follows.
_FEW_FILES = ("sh", "-c", 'ulimit -n 100 && exec "$@"', "sh")


def cellmesh(*args: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, as a terminal does."""
    command = [*before, sys.executable, "-m", "cellmesh", *args]
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
    check_nothing_left(runtime_dir)


@pytest.fixture
def pidfds(train: cm.Mesh) -> Iterator[dict[int, int]]:
    """Pidfds of all processes of ``train``."""
    [mesh] = listed()
    opened = {pid: os.pidfd_open(pid) for pid in mesh["pids"]}
    yield opened
    for number in opened.values():
        os.close(number)


def forged(**changes: Any) -> Ticket:
    """A ticket for which nothing runs."""
    name = changes.get("name", "ghost")
    ticket = Ticket(
        name=name,
        key=new_key(),
        directory=str(make_directory(runtime_root(), name)),
        num_ranks=2,
        backend="auto",
        mesh_dim_names=("dp",),
        mesh_shape=(2,),
        preload=(),
        sys_path=(),
        cwd="/",
        controller_pid=os.getpid(),
        created_at=time.time() - 3600,
        agent_pid=0,
    )
    ticket = msgspec.structs.replace(ticket, **changes)
    write_ticket(ticket)
    return ticket


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with us."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_ps_lists_a_mesh_and_stop_ends_it(
    train: cm.Mesh, pidfds: dict[int, int], runtime_dir: Path
) -> None:
    ticket = read_ticket(runtime_root() / "train" / "ticket.json")
    [mesh] = listed()
    assert (mesh["name"], mesh["state"], mesh["swept"]) == ("train", "running", False)
    assert (mesh["num_ranks"], mesh["mesh"]) == (2, {"dp": 2, "tp": 1})
    assert (mesh["agent_pid"], mesh["controller_pid"]) == (ticket.agent_pid, os.getpid())
    assert mesh["pids"][0] == ticket.agent_pid
    assert {info.pid for info in train.report()} < set(mesh["pids"])
    assert 50e6 < mesh["memory_bytes"] < 2e9
    assert 0 < mesh["age_s"] < 120
    assert mesh["segments_bytes"] == 0
    train.push(x=bytearray(64 << 20))
    assert listed()[0]["segments_bytes"] >= 64 << 20

    shown = cellmesh("ps")
    header, row = shown.stdout.splitlines()
    assert header.split()[:6] == ["NAME", "STATE", "RANKS", "MESH", "AGENT", "CONTROLLER"]
    assert row.split()[:6] == [
        "train", "running", "2", "dp=2,tp=1", str(ticket.agent_pid), str(os.getpid()),
    ]  # fmt: skip
    assert ticket.key not in shown.stdout + json.dumps(mesh)

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


def test_stop_all_ends_every_mesh(runtime_dir: Path) -> None:
    meshes = [cm.start(1, name=name) for name in ("one", "two")]
    try:
        done = cellmesh("stop", "--all")
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
            "stopped one",
            "stopped two",
        ]
        check_nothing_left(runtime_dir)
        assert cellmesh("stop", "--all").stdout == "no mesh is running\n"
    finally:
        for mesh in meshes:
            mesh.stop()


def test_an_agent_that_hangs_is_killed_with_all_below_it(
    train: cm.Mesh, runtime_dir: Path, bystander: subprocess.Popen[bytes]
) -> None:
    # In a session of its own, so that no signal to a process group reaches it.
    started = train[1].run(_start_in_session_of_its_own)
    [mesh] = listed()
    assert started in mesh["pids"]
    watched = [os.pidfd_open(pid) for pid in mesh["pids"]]
    try:
        stop_process(mesh["agent_pid"])
        done = cellmesh("stop", "train", "--timeout", "0.2")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("killed train: 2 ranks")
        assert ended(watched, timeout_s=0)
    finally:
        for number in watched:
            os.close(number)
    check_nothing_left(runtime_dir)
    assert bystander.poll() is None


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


def test_processes_that_outlive_their_agent_are_ended_by_ps(
    train: cm.Mesh, pidfds: dict[int, int], runtime_dir: Path
) -> None:
    agent, zygote = _agent_and_zygote(pidfds)
    process_named(runtime_dir, "cellmesh-guard").kill()
    stop_process(zygote)  # now nobody tidies up
    os.kill(agent, signal.SIGKILL)
    assert ended(number for pid, number in pidfds.items() if pid != zygote)

    told = cellmesh("ps")
    assert told.stdout == "no mesh is running\n"
    assert f"(its agent, process {agent}, has gone): removed" in told.stderr
    assert f"and ended processes {zygote}" in told.stderr
    assert ended([pidfds[zygote]], timeout_s=0)
    check_nothing_left(runtime_dir)


def _agent_and_zygote(pidfds: dict[int, int]) -> tuple[int, int]:
    names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in pidfds}
    return names["cellmesh-agent"], names["cellmesh-zygote"]


@pytest.mark.parametrize("command", [("ps",), ("stop", "ghost"), ("stop", "--all")])
def test_another_process_with_the_agents_number_is_not_touched(
    command: tuple[str, ...], runtime_dir: Path, bystander: subprocess.Popen[bytes]
) -> None:
    ghost = forged(agent_pid=bystander.pid)
    done = cellmesh(*command)
    assert done.returncode == 0
    assert not Path(ghost.directory).exists()
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.2)


def test_an_editor_that_has_a_ticket_open_is_no_process_of_the_mesh(
    runtime_dir: Path,
) -> None:
    ghost = forged(agent_pid=0)
    with subprocess.Popen(["tail", "-f", str(ghost.path)], stdout=subprocess.DEVNULL) as editor:
        try:
            assert "ghost" in cellmesh("stop", "ghost").stdout
            assert not Path(ghost.directory).exists()
            assert editor.poll() is None
        finally:
            editor.kill()


def test_a_mesh_that_is_starting_is_left_alone_by_ps(runtime_dir: Path) -> None:
    ghost = forged(created_at=time.time())
    assert [(mesh["name"], mesh["state"], mesh["swept"]) for mesh in listed()] == [
        ("ghost", "starting", False)
    ]
    assert ghost.path.exists()
    assert cellmesh("stop", "ghost").returncode == 0
    assert not Path(ghost.directory).exists()


def test_a_mesh_whose_socket_answers_is_left_alone(runtime_dir: Path) -> None:
    ghost = forged(agent_pid=1)  # as seen from a container: the agent has another number outside
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(ghost.agent_endpoint.removeprefix("ipc://"))
        agent.listen(1)
        done = cellmesh("ps")
        assert done.stdout == "no mesh is running\n"
        assert "ghost is not seen from here" in done.stderr
        assert "there is no mesh 'ghost'" in cellmesh("stop", "ghost").stderr
        assert ghost.path.exists()


def test_a_ticket_that_speaks_of_another_place_removes_nothing(
    runtime_dir: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    ghost = forged()
    moved = msgspec.structs.replace(ghost, directory=str(precious))
    ghost.path.write_bytes(to_json(moved))
    assert [mesh["state"] for mesh in json.loads(cellmesh("ps", "--json").stdout)] == ["elsewhere"]
    assert cellmesh("stop", "--all").returncode == 0
    assert precious.exists()


# ---- doctor


def test_doctor_starts_a_mesh_and_leaves_nothing(runtime_dir: Path) -> None:
    done = cellmesh("doctor", "--json", "--ranks", "1")
    told = json.loads(done.stdout)
    findings = {finding["title"]: finding for finding in told["findings"]}
    problems = [finding for finding in told["findings"] if finding["status"] == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert findings["a real mesh"]["status"] == "ok", findings["a real mesh"]
    assert findings["torch"]["status"] != "problem"
    assert findings["forking ranks"]["status"] == "ok"
    assert findings["a real mesh"]["text"].startswith("2 ranks with ")
    assert told["version"] == cm.__version__
    check_nothing_left(runtime_dir)


def test_doctor_finds_too_low_a_limit_and_says_so_by_its_exit_code(runtime_dir: Path) -> None:
    runtime_dir.joinpath("cellmesh").mkdir(mode=0o755)
    os.chmod(runtime_dir / "cellmesh", 0o755)
    done = cellmesh("doctor", "--no-start", "--ranks", "8", before=_FEW_FILES)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    [files] = [i for i, line in enumerate(lines) if line.startswith("problem  open files")]
    assert "100 a process: enough for about 3 ranks, and 8 are wanted" in lines[files]
    assert lines[files + 1].strip().startswith("mend: `ulimit -n 4096` before")
    [directory] = [line for line in lines if line.startswith("problem  runtime directory")]
    assert "must belong to you alone" in directory
    assert "a real mesh" not in done.stdout
    assert "problems" in lines[-1]


def test_ps_shows_a_mesh_without_a_holder_and_stop_ends_it(runtime_dir: Path) -> None:
    mesh = cm.start(1, name="left", lease_s=600)
    [held] = listed()
    assert (held["state"], held["attached"], held["lease_left_s"]) == ("running", True, None)
    mesh.detach()
    [left] = listed()
    assert (left["state"], left["attached"], left["lease_s"]) == ("detached", False, 600)
    assert 500 < left["lease_left_s"] <= 600
    row = cellmesh("ps").stdout.splitlines()[1]
    assert row.split()[:2] == ["left", "detached"]
    assert re.search(r"none, (10 min|5\d\d s|9 min) left", row)
    assert cellmesh("stop", "left").stdout.startswith("stopped left: 1 rank, ")
    check_nothing_left(runtime_dir)


def test_ps_shows_tickets_of_other_versions(runtime_dir: Path) -> None:
    forged(name="old", version="9.9.9", agent_pid=1)
    done = cellmesh("ps")
    assert done.stdout == "no mesh is running\n"
    assert "cellmesh 9.9.9, and this is" in done.stderr
    shutil.rmtree(runtime_root() / "old")


def test_a_mesh_of_another_place_is_not_swept(runtime_dir: Path) -> None:
    ghost = forged(place=Place("elsewhere", "boot", "pid:[1]"), agent_pid=1 << 22)
    assert [mesh["state"] for mesh in listed()] == ["elsewhere"]
    assert ghost.path.exists()
    shutil.rmtree(ghost.directory)
