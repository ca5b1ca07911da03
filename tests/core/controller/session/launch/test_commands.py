"""Agents of several hosts are started at once, and those that start do not need the others."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.controller.session.launch import commands as commands_module
from cellmesh.controller.session.launch.commands import (
    ALL_LOG,
    HostCommands,
    command_to_try,
    describe_job_end,
    explain,
)
from cellmesh.controller.session.launch.ray_driver import choose_bundle
from cellmesh.wire.host import Place
from cellmesh.wire.hosts import ANNOUNCEMENT, Announcement, Host, HostPart
from cellmesh.wire.ticket import Ticket

from .....support.tickets import make_ticket

WAIT_S = 30.0
# What the hosts do: a and b start only beside each other, as they wait for each other's file.
SCRIPT = """
cd {directory}; touch $0; read ticket
case $0 in
  a) until [ -e b ]; do sleep 0.01; done; cat announced; read go;;
  b) until [ -e a ]; do sleep 0.01; done; cat announced; read go;;
  broken) echo no such file >&2; exit 3;;
  full) cat problem; read go;;
  silent) read go;;
esac
"""


def parts(*names: str) -> list[HostPart]:
    return [HostPart(i, len(names), name, i, 1, "key", ("here",)) for i, name in enumerate(names)]


def announce(path: Path, said: Announcement) -> None:
    path.write_bytes(ANNOUNCEMENT.encode() + msgspec.json.encode(said) + b"\n")


@pytest.fixture
def commands(tmp_path: Path) -> HostCommands:
    for name, problem in (("announced", ""), ("problem", "the disk is full")):
        said = Announcement(place=Place("h", "boot", "pids"), problem=problem)
        announce(tmp_path / name, said)
    (tmp_path / "logs").mkdir()
    return HostCommands()


@pytest.fixture
def ticket(tmp_path: Path) -> Ticket:
    launch = f"sh -c '{SCRIPT.format(directory=tmp_path)}' {{host}} {{command}}"
    return make_ticket(directory=str(tmp_path), launch=launch)


def test_hosts_start_at_once_whatever_becomes_of_others(
    commands: HostCommands, ticket: Ticket
) -> None:
    names = parts("a", "broken", "full", "silent", "b")
    started = commands.start(ticket, names, 3.0, needs_all=False)
    expected = ("", "broken: .*no such file", "full: the disk is full", "silent did not answer", "")
    for each, text in zip(started, expected, strict=True):
        assert re.fullmatch(f"(?s){text}.*" if text else "", each.problem)
    for index in (3, 2, 1, 0):
        commands.drop(index)
    assert [each.name for each in commands._starting] == ["b"]
    commands.let_go()
    assert commands.wait(WAIT_S)


def test_host_that_is_needed_fails_the_start(commands: HostCommands, ticket: Ticket) -> None:
    started = commands.start(ticket, parts("silent", "full"), WAIT_S)
    assert [each.problem for each in started] == ["full: the disk is full"]
    commands.end()
    assert commands.wait(0)


# Starts the agents of all hosts, of which each says its number.
ALL = """
cd {directory}; read ticket
echo cellmesh-waiting: 1 of 2 nodes; echo login: welcome
for rank in 1 0; do cat announced$rank; done
read go; echo $go > let_go
"""


@pytest.fixture
def all_hosts(tmp_path: Path) -> HostCommands:
    for rank in (0, 1):
        at = Host(f"n{rank}", f"tcp://n{rank}:5", "key", rank, 1)
        announce(tmp_path / f"announced{rank}", Announcement(host=at, job="7"))
    (tmp_path / "logs").mkdir()
    return HostCommands(f"sh -c '{ALL.format(directory=tmp_path)}' {{mesh}} {{command}}")


def test_one_command_starts_all_hosts_and_is_let_go(
    all_hosts: HostCommands, ticket: Ticket, tmp_path: Path
) -> None:
    reports: list[str] = []
    all_hosts.report = reports.append
    announced = all_hosts.start(ticket, parts("", ""), WAIT_S)
    assert [each.host.name for each in announced] == ["n0", "n1"]
    assert reports == ["1 of 2 nodes"]
    assert not all_hosts.wait(0)
    all_hosts.let_go()
    assert all_hosts.wait(WAIT_S)
    assert (tmp_path / "let_go").read_text() == "go\n"


def test_end_of_a_notebook_ends_the_command_that_was_not_let_go(
    all_hosts: HostCommands, ticket: Ticket, tmp_path: Path
) -> None:
    all_hosts.start(ticket, parts("", ""), WAIT_S)
    all_hosts.end()
    assert all_hosts.wait(0)
    assert (tmp_path / "let_go").read_text() == "\n"


def test_time_does_not_run_while_a_job_is_queued(
    all_hosts: HostCommands, ticket: Ticket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes are given once the queue was asked three times, each beyond the start's time."""
    monkeypatch.setattr(commands_module, "_ASK_S", 0.01)
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\ncd {tmp_path}; echo x >> asked\n"
        '[ $(wc -l < asked) -lt 3 ] && echo "12 PENDING Priority" || touch given\n'
    )
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    wait = f"until [ -e {tmp_path}/given ]; do sleep 0.01; done"
    all_hosts.first = all_hosts.first.replace("read ticket", f"read ticket; {wait}", 1)
    reports: list[str] = []
    all_hosts.report = reports.append
    queued = msgspec.structs.replace(ticket, launch="slurm")
    announced = all_hosts.start(queued, parts("", ""), WAIT_S)
    assert len(announced) == 2
    assert reports == ["job 12: pending (Priority)"] * 2 + ["1 of 2 nodes"]
    all_hosts.end()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("srun: error: n2: task 1: Killed", ""),
        ("srun: error: Node failure on n2", "Node failure on n2"),
        ("srun: error: Node failure on n21", ""),
        (
            "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED DUE TO TIME LIMIT ***\nsrun: no",
            "*** STEP 7.0 ON n1 CANCELLED DUE TO TIME LIMIT ***",
        ),
    ],
)
def test_end_of_a_job_is_described_as_srun_prints_it(
    log: str, said: str, ticket: Ticket, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / ALL_LOG).write_text(log + "\n")
    slurm = msgspec.structs.replace(ticket, launch="slurm", job="7")
    text = f"Slurm: {said} (`scontrol show job 7`)" if said else ""
    assert describe_job_end(slurm, "n2") == text


# ---- why a command failed

PYTHON = "/opt/env/bin/python"
SSH, NEXT = "ssh: connect to host b port 22: Connection", "Python is not there"
DOCKER = "docker exec -i {host} {command}"
SRUN = "srun --jobid=5 --overlap --nodes=1 --nodelist={host} {command}"
RAY = f"{PYTHON} -m cellmesh.controller.session.launch.ray_driver run GROUP {{host}} {{command}}"


@pytest.mark.parametrize(
    ("launch", "said", "text", "remedy"),
    [
        ("", "ssh: Could not resolve hostname b: Name or", "does not resolve", "`ssh b true`"),
        ("", "Host key verification failed.", "key is not known", "`ssh b`"),
        ("", "root@b: Permission denied (publickey).", "refuses your key", "ssh-copy-id b"),
        ("", f"{SSH} refused", "nothing listens", "sshd"),
        ("", f"{SSH} timed out", "not reached", "firewall"),
        (
            "",
            f"{PYTHON}: No module named cellmesh",
            "no cellmesh",
            f"`{PYTHON} -m pip install cell",
        ),
        ("", "ModuleNotFoundError: No module named 'zmq'", "lacks a package", "pip install zmq"),
        ("", "OSError: [Errno 28] No space left on device", "disk is full", "free some space on b"),
        ("", f"sh: 1: exec: {PYTHON}: not found", NEXT, "installed on b"),
        ("", "refused by somebody", "ssh exited with 1", f"b '{PYTHON} -m cellmesh --version'`"),
        (DOCKER, "No such container: b", "docker exited with 1", f"`docker exec -i b {PYTHON} -m"),
        (DOCKER, f"OCI exec failed: stat {PYTHON}: no such file or directory", NEXT, "on b"),
        (SRUN, "Connection timed out", "srun exited with 1", f"=b {PYTHON} -m cellmesh --version`"),
        (RAY, "Connection refused", "exited with 1", "`ray status`"),
    ],
)
def test_failure_says_what_is_wrong_and_what_mends_it(
    launch: str, said: str, text: str, remedy: str
) -> None:
    sentence = explain("b", launch, PYTHON, 1, said)
    cause, _, mend = sentence.partition(". Next: ")
    assert cause.startswith("b: ")
    assert text in cause
    assert remedy in mend
    assert said in sentence
    assert "exited with 1" in sentence
    assert not launch or "ssh" not in sentence


def test_a_shell_that_finds_no_python_need_not_say_so() -> None:
    assert NEXT in explain("b", "", PYTHON, 127, "")


def test_command_to_try_can_be_typed() -> None:
    run = f"{PYTHON} -m cellmesh --version"
    assert command_to_try("b", SRUN, PYTHON) == f"srun --overlap --nodes=1 --nodelist=b {run}"


# ---- the resources that the Ray driver asks for


def node(name: str, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerHostname": name, "Alive": is_alive, "Resources": resources}


NODES = [node("a", CPU=8.0), node("b", CPU=2.0, GPU=2.0), node("c", False, CPU=64.0, GPU=8.0)]


@pytest.mark.parametrize(
    ("nodes", "resources", "bundle"),
    [
        (NODES, {}, {"CPU": 2.0, "GPU": 2.0}),
        (NODES[:1], {}, {"CPU": 2.0}),
        (NODES, {"fast": 1.0}, {"fast": 1.0}),
    ],
)
def test_each_rank_gets_a_cpu_and_a_gpu_where_there_are_some(
    nodes: Any, resources: dict[str, float], bundle: dict[str, float]
) -> None:
    assert choose_bundle(nodes, 2, resources) == bundle
