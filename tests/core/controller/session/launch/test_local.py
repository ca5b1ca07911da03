"""The launcher of an agent on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import cellmesh
from cellmesh.controller.options import Options
from cellmesh.controller.session.launch.local import (
    Launcher,
    LocalAgent,
    Process,
    Started,
    command_of,
    describe_full_disk,
    make_ticket,
)
from cellmesh.errors import HostError
from cellmesh.wire.host import started_ticks
from cellmesh.wire.ticket import remove_directory
from tests.core.controller.session.test_session import TICKET


@contextlib.contextmanager
def agent_of(child: subprocess.Popen[bytes]) -> Iterator[Launcher]:
    """A launcher whose agent is a child of this process."""
    agent = Process(child.pid, started_ticks(child.pid))
    launcher = LocalAgent(TICKET, lambda ticket: Started(agent, child.wait))
    end = launcher.start()
    try:
        yield launcher
    finally:
        os.close(end)
        child.kill()
        child.wait()


def test_the_agent_is_started_by_an_interpreter_that_runs_a_file_of_this_package() -> None:
    interpreter = os.path.join(os.path.dirname(cellmesh.__file__), "wire", "process.py")
    assert command_of(TICKET) == [
        sys.executable,
        "-P",
        interpreter,
        "cellmesh.workers.agent.guardian",
        "/nowhere/ticket.json",
    ]


def test_an_agent_is_waited_for_signalled_and_described() -> None:
    with subprocess.Popen(["sleep", "100"]) as child, agent_of(child) as launcher:
        assert launcher.describe() == f"process {child.pid} on this machine"
        assert launcher.poll()
        assert not launcher.wait(0)
        launcher.signal(signal.SIGKILL)
        assert launcher.wait(None)
        assert not launcher.poll()
        assert child.returncode == -signal.SIGKILL
        launcher.signal(signal.SIGKILL)  # there is none any more


def test_the_descriptor_of_an_agent_can_be_read_once_it_has_ended() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        launcher = LocalAgent(
            TICKET, lambda ticket: Started(Process(child.pid, started_ticks(child.pid)))
        )
        end = launcher.start()
        child.kill()
        assert Process(child.pid, started_ticks(child.pid)).wait(10)
        assert os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT) is not None
        os.close(end)


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_process_with_the_number_of_an_agent_that_has_ended_is_left_alone(ticks: int) -> None:
    launcher = LocalAgent(TICKET, lambda ticket: Started(Process(os.getpid(), ticks)))
    with pytest.raises(HostError, match="the agent has ended"):
        launcher.start()
    assert not launcher.poll()
    assert launcher.wait(None)
    launcher.signal(signal.SIGKILL)


@pytest.mark.parametrize(("num_pages", "is_full"), [(0, True), (1, True), (1 << 20, False)])
def test_a_start_that_leaves_no_log_says_that_the_disk_is_full(
    num_pages: int, is_full: bool, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = make_ticket(Options(num_ranks=1, mesh={"dp": 1}))
    remove_directory(Path(ticket.directory))  # as its guardian does
    disk = SimpleNamespace(f_bavail=num_pages, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", {runtime_dir / "cellmesh": disk}.__getitem__)
    text = describe_full_disk(ticket)
    assert is_full == (f"{4 * num_pages} kB are left: free some space" in text)
    assert is_full == bool(text)
