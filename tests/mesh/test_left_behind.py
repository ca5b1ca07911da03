"""What user code starts in sessions of its own ends with its mesh, whichever process of ours is
killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

import cellmesh as cm
from cellmesh.wire import marks
from cellmesh.wire.ticket import find_tickets, read_ticket, runtime_root
from tests.conftest import check_nothing_left, process_named, processes_of, run_python

WAIT_S = 20.0
STARTS_COLD = True  # guardian, agent and zygote are started as scripts start them
# A child in a session of its own, one that was forked twice and runs no program, one without
# environment.
START = """
import os, signal, subprocess
sleep = ["sleep", "1000"]
child = subprocess.Popen(sleep, start_new_session=True).pid
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if pid := os.fork():
        os.write(write_end, b"%d" % pid)
        os._exit(0)
    for number in range(3, 256):
        try:
            os.close(number)
        except OSError:
            pass
    signal.pause()
os.wait()
alone = subprocess.Popen(sleep, start_new_session=True, env={})
started = [child, int(os.read(read_end, 20)), alone.pid]
"""


def start_daemons(mesh: cm.Mesh) -> list[list[psutil.Process]]:
    """Three of each rank: with the mark, with the mark and no exec, without environment."""
    mesh.cell(START)
    return [[psutil.Process(pid) for pid in pids] for pids in mesh.pull("started").list]


def end_unknown(daemons: Sequence[Sequence[psutil.Process]]) -> None:
    """End those without environment: nothing tells whose they are, and no subreaper was left."""
    unknown = [of_rank[2] for of_rank in daemons]
    for daemon in unknown:
        daemon.kill()
    assert gone(unknown)


def gone(processes: Sequence[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=WAIT_S)[1]


@pytest.fixture
def doomed(runtime_dir: Path) -> Iterator[tuple[cm.Mesh, list[list[psutil.Process]]]]:
    """Two ranks with three daemons each, of a mesh that will not be stopped."""
    mesh = cm.start(2)
    daemons = start_daemons(mesh)
    yield mesh, daemons
    with contextlib.suppress(cm.errors.CellmeshError):
        mesh.stop()
    for daemon in [one for of_rank in daemons for one in of_rank]:
        with contextlib.suppress(psutil.Error):
            daemon.kill()
            raise AssertionError(f"left behind: {daemon}")


def kill(directory: Path, names: Sequence[str]) -> None:
    """Kill these at once: what could tidy up is stopped before."""
    victims = [process_named(directory, f"cellmesh-{name}") for name in names]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for victim in victims:
            victim.send_signal(number)


@pytest.mark.parametrize("victims", [("agent",), ("store", "zygote", "agent"), ("guard",)])
def test_no_process_is_left_when_processes_of_the_mesh_are_killed(
    victims: tuple[str, ...], runtime_dir: Path, doomed: tuple[cm.Mesh, list[list[psutil.Process]]]
) -> None:
    mesh, (first, second) = doomed
    kill(runtime_dir, victims)
    if victims == ("guard",):  # the mesh goes on
        assert mesh.pull("rank").list == [0, 1]
        mesh.stop()
    assert gone([*first, *second])


def test_the_zygote_ends_what_carries_the_mark_where_guardian_and_agent_are_killed(
    runtime_dir: Path, doomed: tuple[cm.Mesh, list[list[psutil.Process]]]
) -> None:
    _, daemons = doomed
    kill(runtime_dir, ("guard", "agent"))
    assert gone([one for of_rank in daemons for one in of_rank[:2]])
    check_nothing_left(runtime_dir)
    end_unknown(daemons)


@pytest.mark.parametrize("command", ["ps", "start"])
def test_the_next_command_ends_what_is_left_where_all_are_killed(
    command: str, runtime_dir: Path, doomed: tuple[cm.Mesh, list[list[psutil.Process]]]
) -> None:
    _, daemons = doomed
    (ticket,) = find_tickets(runtime_root())
    kill(runtime_dir, ("guard", "zygote", "agent"))
    left = {one.pid for of_rank in daemons for one in of_rank}
    assert gone([one for one in processes_of(runtime_dir) if one.pid not in left])
    assert Path(ticket.directory).exists()
    assert marks.carriers(marks.value_of(ticket.mark)), "they were to be left"
    if command == "start":
        with cm.start(1, name="other"):
            assert [one.name for one in find_tickets(runtime_root())] == ["other"]
    else:
        done = run_python("-m", "cellmesh", *command.split(), check=False)
        assert ticket.name in done.stdout + done.stderr
    assert gone([one for of_rank in daemons for one in of_rank[:2]])
    assert not Path(ticket.directory).exists()
    end_unknown(daemons)


def test_a_restart_ends_what_the_old_ranks_started_and_a_death_what_that_rank_did(
    own_mesh: cm.Mesh, runtime_dir: Path
) -> None:
    first, second = start_daemons(own_mesh)
    own_mesh.restart()
    assert gone([*first, *second])
    first, second = start_daemons(own_mesh)
    with pytest.raises(cm.RankFailure):
        own_mesh[1].cell("os._exit(1)")
    assert gone(second[:2])
    assert all(daemon.is_running() for daemon in first)
    own_mesh.heal()
    assert all(daemon.is_running() for daemon in first)
    own_mesh.stop()
    assert gone([*first, *second])


def test_no_process_of_a_mesh_that_may_live_is_ended(own_mesh: cm.Mesh) -> None:
    daemons = [one for of_rank in start_daemons(own_mesh) for one in of_rank]
    (ticket,) = find_tickets(runtime_root())
    elsewhere = msgspec.structs.replace(ticket.place, pid_namespace="pid:[1]")
    for change in ({}, {"place": elsewhere, "agent_pid": 1}, {"agent_pid": 0, "agent_ticks": 0}):
        claimed = msgspec.structs.replace(ticket, **change)
        assert not marks.is_dead(claimed)
        marks.end_mesh_if_dead(claimed)
    marks.end_dead_meshes(runtime_root())
    assert all(daemon.is_running() for daemon in daemons)
    assert own_mesh.pull("rank").list == [0, 1]
    assert read_ticket(ticket.path) == ticket
    assert os.getpid() not in marks.carriers(marks.value_of(ticket.mark))
