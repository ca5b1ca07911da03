"""The launcher of an agent on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import cellmesh
from cellmesh.controller.session.launch.local import (
    Launcher,
    LocalAgent,
    Process,
    Started,
    command_of,
)
from cellmesh.errors import HostError
from cellmesh.wire.host import started_ticks
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
    interpreter = os.path.join(os.path.dirname(cellmesh.__file__), "wire", "interpreter.py")
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
