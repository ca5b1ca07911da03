"""Hosts that announce themselves: a person starts `cellmesh agent` on each."""

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
from cellmesh.errors import CellmeshError, HostError
from tests.faults.watching import wait_until

from .netns import NOTEBOOK, Host

WAIT_S = 60.0
AGENT = (sys.executable, "-m", "cellmesh", "agent")
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"
Begin = Callable[..., Future[cm.Mesh]]


@pytest.fixture
def begin(machines: list[Host], runtime_dir: Path) -> Iterator[Begin]:
    """Starts a mesh that waits for two hosts, on another thread."""
    with ThreadPoolExecutor(1) as pool:

        def submit(**options: Any) -> Future[cm.Mesh]:
            default = {"launch": "hand", "nodes": 2, "nproc_per_host": 2, "address": NOTEBOOK}
            return pool.submit(lambda: cm.start(**{**default, "timeout_s": WAIT_S, **options}))

        yield submit


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
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


def check(mesh: cm.Mesh, names: set[str]) -> None:
    assert set(mesh.run(lambda: __import__("socket").gethostname()).list) == names
    mesh.cell(REDUCE)
    assert mesh.pull("float(x)").list == [6.0] * 4


def test_ticket_is_taken_from_a_file_or_the_environment(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    mesh_to_be = begin()
    path = invitation_in(runtime_dir)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().strip()
    started.append(machines[0].start(*AGENT, "--ticket", str(path)))
    script = f'CELLMESH_TICKET="$(cat {path})" exec {" ".join(AGENT)}'
    started.append(machines[1].start("sh", "-c", script))
    with mesh_to_be.result() as mesh:
        check(mesh, {"cm1", "cm2"})
        assert mesh.run(lambda: os.environ.get("CELLMESH_TICKET")).list == [None] * 4
        for host in machines[:2]:
            for process in host.processes():
                assert secret not in " ".join(process.cmdline())
                assert secret not in host.read_log()
        shown = capfd.readouterr().err
        assert str(path) in shown
        assert secret not in shown


def test_ticket_is_taken_from_standard_input_or_a_prompt(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
) -> None:
    mesh_to_be = begin()
    text = invitation_in(runtime_dir).read_bytes()
    # A person may have opened a session by a network on which hosts do not reach each other.
    session = ("env", "SSH_CONNECTION=127.0.0.1 5 127.0.0.1 22")
    started.append(machines[0].start(*session, *AGENT, stdin=text))
    started.append(machines[1].start(*AGENT, has_terminal=True, stdin=b""))
    prompt = machines[1]
    wait_until(lambda: "Paste the ticket" in prompt.read_log(), WAIT_S, "the prompt")
    pipe = started[1].stdin
    assert pipe is not None
    pipe.write(text)
    pipe.flush()
    with mesh_to_be.result() as mesh:
        check(mesh, {"cm1", "cm2"})
        assert text.decode().strip() not in prompt.read_log()


def test_dead_host_is_replaced_by_one_that_announces_itself(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
) -> None:
    mesh_to_be = begin(lease_s=60)
    path = str(invitation_in(runtime_dir))
    started += [host.start(*AGENT, "--ticket", path) for host in machines[:2]]
    with mesh_to_be.result() as mesh:
        mesh.cell("kept = rank + 5")
        lost = next(host for host in machines[:2] if host.name == mesh.report()[2].host)
        lost.kill()
        wait_until(lambda: mesh.rank_set.session.dead_ranks == {2, 3}, WAIT_S, "it is lost")
        started.append(machines[2].start(*AGENT, "--ticket", path))
        assert mesh.heal(0).respawned == (2, 3)
        assert {mesh.report()[rank].host for rank in (2, 3)} == {"cm3"}
        assert mesh[[0, 1]].pull("kept").list == [5, 6]
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4


def test_hosts_with_other_versions_are_named(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    metadata = tmp_path / "torch-2.11.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    mesh_to_be = begin()
    path = str(invitation_in(runtime_dir))
    started.append(machines[0].start(*AGENT, "--ticket", path))
    started.append(machines[1].start("env", f"PYTHONPATH={tmp_path}", *AGENT, "--ticket", path))
    with pytest.raises(HostError, match=r"differ in their torch: .*cm2 has 2\.11\.0"):
        mesh_to_be.result()
    wait_until(lambda: "cm2 has 2.11.0" in machines[1].read_log(), WAIT_S, "the host is told")
    # The agent of the other host was started, and ends.
    wait_until(lambda: not any(host.meshes() for host in machines), WAIT_S, "no agent is left")


def test_start_without_enough_hosts_sends_the_others_away(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
) -> None:
    mesh_to_be = begin(timeout_s=5.0)
    path = str(invitation_in(runtime_dir))
    started.append(machines[0].start(*AGENT, "--ticket", path))
    with pytest.raises(CellmeshError, match="2 hosts are awaited, and cm1 announced itself"):
        mesh_to_be.result()
    assert started[0].wait(WAIT_S) == 1


@pytest.mark.parametrize("how", ["file that others can read", "another mesh's listener"])
def test_ticket_that_cannot_be_used_is_refused(
    how: str, begin: Begin, machines: list[Host], runtime_dir: Path, tmp_path: Path
) -> None:
    ticket = tmp_path / "join.json"
    mesh_to_be = begin(timeout_s=3.0)
    ticket.write_bytes(invitation_in(runtime_dir).read_bytes())
    ticket.chmod(0o644 if how.startswith("file") else 0o600)
    if not how.startswith("file"):
        invitation = json.loads(ticket.read_text())
        invitation["secret"] = "x" + invitation["secret"]
        ticket.write_text(json.dumps(invitation))
    process = machines[0].start(*AGENT, "--ticket", str(ticket))
    assert process.wait(WAIT_S) == 1
    expected = "not yours alone" if how.startswith("file") else "damaged"
    assert expected in machines[0].read_log()
    with pytest.raises(CellmeshError):
        mesh_to_be.result()


@pytest.mark.timeout(240)
def test_mesh_grows_by_a_host_that_announces_itself_and_shrinks(
    begin: Begin,
    machines: list[Host],
    runtime_dir: Path,
    started: list[subprocess.Popen[bytes]],
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
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [15.0] * 6
        mesh.resize(2)
        assert mesh.pull("kept").list == [5, 6]
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [1.0] * 2
        left = [host for host in machines if host.name != mesh.report()[0].host]
        wait_until(lambda: not any(host.meshes() for host in left), WAIT_S, "the others have left")
