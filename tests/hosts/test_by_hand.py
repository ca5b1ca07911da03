"""Hosts that announce themselves: a person starts `cellmesh agent` on each, or torchrun does."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from tests.faults.watching import wait_until

from .netns import NOTEBOOK, Host

WAIT_S = 60.0
AGENT = (sys.executable, "-m", "cellmesh", "agent")
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
Begin = Callable[..., Future[cm.Mesh]]
Started = list[subprocess.Popen[bytes]]
TORCHRUN = (
    *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
    *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-endpoint", "cm1:29400"),
    *("--rdzv-id", "test", "-m", "cellmesh", "agent", "--ticket"),
)


@pytest.fixture
def begin(machines: list[Host], runtime_dir: Path) -> Iterator[Begin]:
    """Starts a mesh that waits for two hosts, on another thread."""
    with ThreadPoolExecutor(1) as pool:

        def submit(**options: Any) -> Future[cm.Mesh]:
            default = {"launch": "hand", "nodes": 2, "nproc_per_host": 2, "address": NOTEBOOK}
            return pool.submit(lambda: cm.start(**{**default, "timeout_s": WAIT_S, **options}))

        yield submit


@pytest.fixture
def started() -> Iterator[Started]:
    """What a test starts on hosts; it ends with the mesh."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.wait(WAIT_S)
        if process.stdin is not None:
            process.stdin.close()


def invitation_in(runtime_dir: Path) -> Path:
    def find() -> list[Path]:
        return [path for path in runtime_dir.glob("cellmesh/*/join.json") if path.stat().st_size]

    wait_until(lambda: bool(find()), WAIT_S, "the ticket is written")
    return find()[0]


def check_reduce(mesh: cm.Mesh, total: float) -> None:
    mesh.cell(REDUCE)
    assert set(mesh.pull("float(x)").list) == {total}


def test_ticket_is_taken_from_a_file_the_environment_standard_input_or_a_prompt(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: Started,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mesh_to_be = begin(nodes=4, nproc_per_host=1)
    path = invitation_in(runtime_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_bytes()
    secret = text.decode().strip()
    started.append(machines[0].start(*AGENT, "--ticket", str(path)))
    script = f'CELLMESH_TICKET="$(cat {path})" exec {" ".join(AGENT)}'
    started.append(machines[1].start("sh", "-c", script))
    # A person may have opened a session by a network on which hosts do not reach each other.
    session = ("env", "SSH_CONNECTION=127.0.0.1 5 127.0.0.1 22")
    started.append(machines[2].start(*session, *AGENT, stdin=text))
    started.append(machines[3].start(*AGENT, has_terminal=True, stdin=b""))
    wait_until(lambda: "Paste the ticket" in machines[3].read_log(), WAIT_S, "the prompt")
    pipe = started[3].stdin
    assert pipe is not None
    pipe.write(text)
    pipe.flush()
    with mesh_to_be.result() as mesh:
        names = mesh.run(lambda: __import__("socket").gethostname()).list
        assert set(names) == {"cm1", "cm2", "cm3", "cm4"}
        check_reduce(mesh, 6.0)
        assert mesh.run(lambda: os.environ.get("CELLMESH_TICKET")).list == [None] * 4
        for host in machines:
            assert secret not in host.read_log()
            assert not [p for p in host.processes() if secret in " ".join(p.cmdline())]
        shown = capfd.readouterr().err
        assert str(path) in shown
        assert secret not in shown


def test_start_without_enough_hosts_sends_the_others_away(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: Started,
) -> None:
    mesh_to_be = begin(timeout_s=5.0)
    path = str(invitation_in(runtime_dir))
    started.append(machines[0].start(*AGENT, "--ticket", path))
    with pytest.raises(CellmeshError, match="2 hosts are awaited, and cm1 announced itself"):
        mesh_to_be.result()
    assert started[0].wait(WAIT_S) == 1


def test_ticket_of_another_listener_is_refused(
    begin: Begin, machines: list[Host], runtime_dir: Path, tmp_path: Path
) -> None:
    ticket = tmp_path / "join.json"
    mesh_to_be = begin(timeout_s=3.0)
    invitation = json.loads(invitation_in(runtime_dir).read_text())
    invitation["secret"] = "x" + invitation["secret"]
    ticket.touch(0o600)
    ticket.write_text(json.dumps(invitation))
    process = machines[0].start(*AGENT, "--ticket", str(ticket))
    assert process.wait(WAIT_S) == 1
    assert "damaged" in machines[0].read_log()
    with pytest.raises(CellmeshError):
        mesh_to_be.result()


@pytest.mark.timeout(240)
def test_mesh_grows_by_a_host_that_announces_itself_and_shrinks(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: Started,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mesh_to_be = begin(lease_s=60)
    path = str(invitation_in(runtime_dir))
    started += [host.start(*AGENT, "--ticket", path) for host in machines[:2]]
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(mesh_to_be.result())
        mesh.cell("kept = rank + 5")
        mesh.detach()  # who attaches listens where this process did
        mesh = stack.enter_context(cm.attach(mesh.name))
        mesh.cell(REDUCE)  # once the groups are made
        pool = stack.enter_context(ThreadPoolExecutor(1))
        capfd.readouterr()
        resized = pool.submit(lambda: mesh.resize(hosts="cm3:2"))
        text = ""

        def is_asked_for() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "cellmesh agent --ticket" in text or resized.done()

        wait_until(is_asked_for, WAIT_S, "the line to start is shown")
        assert not resized.done(), (resized.exception(), text)
        started.append(machines[2].start(*AGENT, "--ticket", path))
        resized.result()
        assert [info.host for info in mesh.report()][4:] == ["cm3"] * 2
        assert mesh[[0, 1, 2, 3]].pull("kept").list == [5, 6, 7, 8]
        check_reduce(mesh, 15.0)
        mesh.resize(2)
        assert mesh.pull("kept").list == [5, 6]
        check_reduce(mesh, 1.0)
        left = [host for host in machines if host.name != mesh.report()[0].host]
        wait_until(lambda: not any(host.meshes() for host in left), WAIT_S, "the others have left")


@pytest.mark.timeout(240)
def test_host_that_torchrun_starts_again_heals_the_mesh(
    begin: Begin, machines: list[Host], runtime_dir: Path, started: Started
) -> None:
    """The torchrun of the lost host is run again; that of the other one restarts what it has
    started, and the agent there lives on.
    """
    to_be = begin(launch="torchrun", lease_s=60)
    command = (*TORCHRUN, str(invitation_in(runtime_dir)))
    survivor, lost = machines[:2]
    started += [host.start(*command) for host in machines[:2]]
    with to_be.result() as mesh:
        mesh.cell("kept = rank + 5")
        assert [info.host for info in mesh.report()] == ["cm1", "cm1", "cm2", "cm2"]
        names = mesh.run(lambda: (os.environ["RANK"], os.environ["GROUP_RANK"])).list
        assert names == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
        check_reduce(mesh, 6.0)
        (agent,) = [each for each in survivor.meshes() if each.name() == "cellmesh-agent"]
        lost.kill()
        wait_until(lambda: mesh.rank_set.session.dead_ranks == {2, 3}, WAIT_S, "ranks are lost")
        started.append(lost.start(*command))
        wait_until(
            lambda: f"lives (process {agent.pid})" in survivor.read_log(),
            WAIT_S,
            "the stand-in has found the agent that lives",
        )
        assert mesh.heal(0).respawned == (2, 3)
        assert mesh[[0, 1]].pull("kept").list == [5, 6]
        check_reduce(mesh, 6.0)
        assert agent.is_running()
