"""Kernels on other hosts attach to a mesh by its ticket; notebooks' hosts that vanish."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import HostError, NoMeshError
from cellmesh.wire.ticket import Ticket, read_ticket, runtime_root
from tests.conftest import LEFTOVER_S
from tests.faults.watching import wait_until

from .netns import Host
from .notebook import NotebookError, here, notebook_on, on_host

FORKS_AGENTS = True
WAIT_S = 60.0
HOSTS = "cm1:1,cm2:1"
REDUCE = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x)"


@pytest.fixture
def mesh(machines: list[Host], runtime_dir: Path) -> Iterator[cm.Mesh]:
    """Two ranks on two hosts, started by this process, which keeps its ticket in `runtime_dir`."""
    mesh = cm.start(hosts=HOSTS, lease_s=60, name="far")
    mesh.cell("kept = rank + 5; import pathlib, time")
    yield mesh
    if mesh.alive:
        mesh.stop()
    here("stop", "far")
    for host in machines:
        host.mend()
        on_host(host, "ps")  # forgets what has ended


def ticket_of(name: str = "far") -> Ticket:
    return read_ticket(runtime_root() / name / "ticket.json")


def copy_ticket(host: Host) -> Path:
    """Copy the notebook's ticket to a host, as scp would."""
    path = host.directory / "copied.json"
    shutil.copy2(ticket_of().path, path)
    return path


def gates(directory: Path) -> str:
    """A cell that prints a line once there is a file, and another line after a second file."""
    wait = f"while not pathlib.Path({str(directory)!r}, '{{}}').exists(): time.sleep(0.01)\n"
    return (
        f"{wait.format('begin')}print('begun', flush=True)\n"
        f"{wait.format('go')}print('went on')\nfinal = 'done'"
    )


def test_attach_from_another_host_has_state_missed_output_and_runs(
    mesh: cm.Mesh, machines: list[Host], tmp_path: Path
) -> None:
    cm3 = machines[2]
    mesh.submit_cell(gates(tmp_path))
    path = copy_ticket(cm3)
    mesh.detach()
    (tmp_path / "begin").touch()
    with notebook_on(cm3) as notebook:
        notebook.run(f"mesh = cm.attach({str(path)!r})")
        assert notebook.run("it = [run.title for run in mesh.runs]") == ["cell 2"]
        (tmp_path / "go").touch()
        notebook.run("for run in mesh.runs: run.result(60)")
        assert notebook.run("it = mesh.pull('(kept, final)').list") == [[5, "done"], [6, "done"]]
        assert "begun" in notebook.text
        assert "went on" in notebook.text
        notebook.run(f"mesh.cell({REDUCE!r})")
        assert notebook.run("it = mesh.pull('float(x)').list") == [3.0] * 2
        notebook.run("mesh.cell('kept += 10')")
    with notebook_on(cm3) as notebook:  # a kernel that was restarted needs no argument
        notebook.run("mesh = cm.attach()")
        assert notebook.run("it = mesh.pull('kept').list") == [15, 16]
        notebook.run("mesh.detach()")
    again = cm.attach()  # and the first notebook has its own ticket
    assert again.pull("kept").list == [15, 16]
    again.stop()
    assert "nothing of it listens" in on_host(cm3, "ps").stderr


def test_attach_to_a_held_mesh_is_refused_unless_it_steals(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    path = copy_ticket(machines[2])
    run = mesh.submit_cell("time.sleep(1000)")
    own = f"process {os.getpid()} \\({os.uname().nodename}\\)"
    with notebook_on(machines[2]) as notebook:
        with pytest.raises(NotebookError, match=rf"NoMeshError.*held by {own}.*--steal"):
            notebook.run(f"cm.attach({str(path)!r})")
        assert not run.done()
        notebook.run(f"mesh = cm.attach({str(path)!r}, steal=True)")
        run.wait(WAIT_S)
        with pytest.raises(cm.RankFailure, match=r"process \d+ \(cm3\) has taken the mesh over"):
            run.result()
        notebook.run("mesh.interrupt()\nfor run in mesh.runs: run.wait(60)")
        assert notebook.run("it = mesh.pull('kept').list") == [5, 6]
        notebook.run("mesh.stop()")


def test_attach_by_a_wrong_or_dead_ticket_says_what_is_wrong(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    path = copy_ticket(machines[2])
    (own,) = (machines[0].directory / "run/cellmesh").glob("*/ticket.json")
    with pytest.raises(HostError, match="ticket of the agent on cm1"):
        cm.attach(str(own))
    mesh.stop()
    with pytest.raises(NoMeshError, match=r"no host of far answers: cm1 "):
        cm.attach(str(path))


def test_attach_by_an_old_copy_finds_the_hosts_that_came_later(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    path = copy_ticket(machines[3])
    machines[1].kill()
    wait_until(lambda: mesh.rank_set.session.dead_ranks == {1}, WAIT_S, "cm2 is lost")
    mesh.heal(0, hosts="cm3")
    mesh.resize(hosts="cm4:1")
    assert [agent.name for agent in ticket_of().agents] == ["cm1", "cm3", "cm4"]
    mesh.detach()
    with notebook_on(machines[3]) as notebook:
        notebook.run(f"mesh = cm.attach({str(path)!r})")
        hosts = notebook.run("it = [info.host for info in mesh.report()]")
        assert hosts == ["cm1", "cm3", "cm4"]
        assert notebook.run("it = mesh[[0, 1]].pull('kept').list") == [5, 5]
        notebook.run(f"mesh.cell({REDUCE!r})")
        assert notebook.run("it = mesh.pull('float(x)').list") == [6.0] * 3
        notebook.run("mesh.stop()")


def test_attach_while_the_first_host_is_dead_keeps_the_other(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    """The first host has the store."""
    mesh.detach()
    machines[0].kill()
    again = cm.attach("far")
    assert again.rank_set.session.dead_ranks == {0}
    assert again[1].pull("kept") == 6
    assert again.heal(1).respawned == (0,)
    again.cell(REDUCE)
    assert again.pull("float(x)").list == [3.0] * 2
    again.stop()


def test_notebook_host_that_vanishes_leaves_its_mesh_to_the_lease(machines: list[Host]) -> None:
    with notebook_on(machines[2]) as notebook:
        notebook.run(f"mesh = cm.start(hosts={HOSTS!r}, lease_s=2, name='far')")
        assert notebook.run("it = mesh.pull('rank').list") == [0, 1]
        machines[2].cut()

        def are_gone() -> bool:
            return not any(host.meshes() for host in machines[:2])

        wait_until(are_gone, WAIT_S, "the lease is over")
        for host in machines[:2]:
            assert not list(host.directory.glob("run/cellmesh/*"))
        machines[2].mend()
    assert "no mesh is running" in on_host(machines[2], "ps").stdout


def test_notebook_that_was_suspended_for_longer_than_the_host_lease_attaches_again(
    machines: list[Host],
) -> None:
    with notebook_on(machines[2]) as notebook:
        notebook.run(f"mesh = cm.start(hosts={HOSTS!r}, lease_s=60, host_lease_s=4, name='far')")
        notebook.run("mesh.cell('kept = rank + 5')")
        pid = notebook.run("import os; it = os.getpid()")
        os.kill(pid, signal.SIGSTOP)

        def is_left() -> bool:
            rows = json.loads(on_host(machines[0], "ps", "--json").stdout)
            return bool(rows[0]["state"] == "detached")

        wait_until(is_left, WAIT_S, "the agent gives the notebook up")
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(NotebookError, match="host was not heard any longer"):
            notebook.run("while True: mesh.pull('kept')")
        with pytest.raises(NotebookError, match=r"lives on without this notebook.*dist_attach far"):
            notebook.run("mesh.run(int)")
        notebook.run("mesh = cm.attach('far', steal=True)")
        assert notebook.run("it = mesh.pull('kept').list") == [5, 6]
        notebook.run("mesh.stop()")


def test_ps_and_stop_see_a_mesh_from_every_host(mesh: cm.Mesh, machines: list[Host]) -> None:
    (row,) = json.loads(here("ps", "--json").stdout)
    assert (row["name"], row["state"], row["hosts"]) == ("far", "running", ["cm1", "cm2"])
    assert row["controller_pid"] == os.getpid()
    (there,) = json.loads(on_host(machines[0], "ps", "--json").stdout)
    assert (there["name"], there["state"]) == ("far", "running")
    mesh.detach()
    with cm.start(1, name="near"):  # which ends what is dead
        rows = {row["name"]: row for row in json.loads(here("ps", "--json").stdout)}
        assert rows["far"]["state"] == "detached"
        assert 0 < rows["far"]["lease_left_s"] <= 60
    # On the host of an agent, the command ends that agent's part.
    assert on_host(machines[1], "stop", "far").stdout.startswith("stopped far")
    wait_until(lambda: not machines[1].meshes(), LEFTOVER_S, "cm2 has ended")
    assert machines[0].meshes()
    done = here("stop", "far")
    assert done.stdout.startswith("stopped far"), done
    wait_until(
        lambda: not any(host.meshes() for host in machines), LEFTOVER_S, "the mesh has ended"
    )
    assert not runtime_root().joinpath("far").exists()
