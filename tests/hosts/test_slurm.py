"""A real Slurm: inside an allocation, in one of the mesh's own, and what ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.session.life import StartProgress
from cellmesh.errors import CellmeshError, HostError, RankFailure
from tests.conftest import check_nothing_left
from tests.faults.watching import Stuck, wait_until

from .interrupted_start import die_at, die_with_mesh, interrupt_at, remove_dead
from .netns import run
from .slurm import slurm

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Path]:
    """Two nodes, ``n1`` and ``n2``."""
    assert os.getuid() == 0, "a Slurm of its own needs root: sudo make hosts"
    with slurm() as directory:
        yield directory


@pytest.fixture(autouse=True)
def _no_job_is_left(runtime_dir: Path) -> Iterator[None]:
    yield
    check_nothing_left(runtime_dir)
    try:
        wait_until(lambda: not run("squeue", "-h"), WAIT_S, "no job is left")
    except Stuck as error:
        left = run("squeue"), run("squeue", "--steps"), run("scontrol", "show", "node")
        run("scancel", "--user=root")  # it is this test's, and no other fails by it
        raise Stuck("\n".join([str(error), *left])) from error


def test_mesh_asks_for_nodes_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm hands the notebook's environment on to nodes: that of an ssh session as well."""
    monkeypatch.setenv("SSH_CONNECTION", "10.1.1.1 5 10.9.9.9 22")
    with cm.start(
        launch="slurm",
        nodes=2,
        nproc_per_host=2,
        mesh="host=2,gpu=2",
        launch_args="--time=5 --comment='two words'",
    ) as mesh:
        variables = ("SLURMD_NODENAME", "SSH_CONNECTION")
        found = mesh.run(lambda: [os.environ.get(name) for name in variables]).list
        assert found == [[n, "10.1.1.1 5 10.9.9.9 22"] for n in ("n1", "n1", "n2", "n2")]
        mesh.cell(REDUCE)
        assert mesh.pull("float(x)").list == [6.0] * 4
        assert run("squeue", "-h", "-o", "%j %C").split() == [mesh.name, "4"]
        assert "Comment=two words" in run("scontrol", "show", "job", "--oneliner")


def test_mesh_uses_the_allocation_that_it_is_in_and_grows_there() -> None:
    script = (
        "import cellmesh as cm, os\n"
        "def names(mesh): return mesh.run(lambda: os.environ['SLURMD_NODENAME']).list\n"
        "with cm.start(4, launch='slurm') as mesh:\n"
        "    print(names(mesh))\n"
        "with cm.start(1, launch='slurm', nodes=1) as mesh:\n"
        "    mesh.resize(hosts='n2:1')\n"
        "    print(names(mesh))\n"
    )
    command = ("salloc", "--nodes=2", "--time=5", sys.executable, "-c", script)
    said = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S).stdout
    assert "['n1', 'n1', 'n2', 'n2']" in said
    assert "['n1', 'n2']" in said


def test_a_script_runs_on_nodes_and_ends_with_the_status_of_the_rank_that_failed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch.distributed as dist\n"
        "print(os.environ['SLURMD_NODENAME'], os.environ['RANK'])\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    sys.exit(7)\n"
        "dist.barrier()\n"
    )
    options = ("--launch", "slurm", "--nodes", "2", "--nproc-per-node", "1")
    command = (sys.executable, "-m", "cellmesh", "run", *options, str(script))
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert sorted(done.stdout.splitlines()) == ["n1 0", "n2 1"]
    assert "rank 1 raised SystemExit: 7 (train.py:5); rank 0 " in done.stderr.splitlines()[-1]
    assert done.returncode == 7


def test_queued_job_is_shown_and_cancelled_by_an_interrupt() -> None:
    run("salloc", "--no-shell", "--nodes=2", "--exclusive")
    stages: list[str] = []

    def show(progress: StartProgress) -> None:
        stages.append(progress.stage)
        if "pending" in progress.stage:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cm.start(launch="slurm", nodes=2, nproc_per_host=1, on_progress=show)
    assert re.fullmatch(r"job \d+: pending \(\w+\)", stages[-1])
    assert run("squeue", "-h", "-o", "%j %T").split() == ["no-shell", "RUNNING"]
    run("scancel", "--name=no-shell")


def test_queued_job_of_a_killed_notebook_ends_when_it_gets_nodes(runtime_dir: Path) -> None:
    run("salloc", "--no-shell", "--nodes=2", "--exclusive")
    script = "import cellmesh as cm; cm.start(launch='slurm', nodes=2, nproc_per_host=1)"
    script = f"import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); {script}"
    process = subprocess.Popen([sys.executable, "-c", script])

    def waiting() -> bool:
        return "mesh- PENDING" in run("squeue", "-h", "-o", "%.5j %T")

    wait_until(waiting, WAIT_S, "the job is queued")
    process.kill()
    process.wait()
    run("scancel", "--name=no-shell")
    wait_until(lambda: not run("squeue", "-h"), WAIT_S, "the job has ended")
    remove_dead(runtime_dir)


@pytest.mark.parametrize(
    ("end", "step"),
    [(die_at, "start agents"), (die_at, "wait for ranks"), (interrupt_at, "let agents go")],
)
def test_start_that_ends_with_nodes_gives_them_back(
    runtime_dir: Path, end: Callable[..., None], step: str
) -> None:
    end(step, launch="slurm", nodes=2, nproc_per_host=1, lease_s=600)
    wait_until(lambda: not run("squeue", "-h"), WAIT_S, "the job is given back")
    remove_dead(runtime_dir)


def test_mesh_outlives_its_killed_notebook_for_its_lease(runtime_dir: Path) -> None:
    die_with_mesh(launch="slurm", nodes=2, nproc_per_host=1, lease_s=5, name="kept")
    with cm.attach("kept", steal=True) as mesh:  # before the notebook is missed
        assert mesh.pull("kept").list == [5, 6]
        mesh.detach()
    assert len(run("squeue", "-h").splitlines()) == 1
    wait_until(lambda: not run("squeue", "-h"), WAIT_S, "the job is given back")
    remove_dead(runtime_dir)


def end_by_time() -> None:
    (job,) = run("squeue", "-h", "-o", "%i").split()
    run("scontrol", "update", f"jobid={job}", "timelimit=1")
    # Slurm refuses a time that has passed when it reads it.
    run("scontrol", "update", f"jobid={job}", "endtime=now+5")


ENDS = {
    "CANCELLED AT [^ ]+ \\*": lambda: run("scancel", "--name=ending"),
    "DUE TO TIME LIMIT": end_by_time,
}


@pytest.mark.parametrize("why", ENDS)
def test_allocation_that_ends_in_a_cell_says_why(why: str) -> None:
    asked = {"launch": "slurm", "nodes": 2, "nproc_per_host": 1, "launch_args": "--time=5"}
    mesh = cm.start(**asked, lease_s=60, name="ending")  # type: ignore[arg-type]
    busy = mesh.submit_cell("while True: dist.all_reduce(torch.ones(1))")
    ENDS[why]()
    why = rf"Slurm: \*\*\* STEP .* {why}.* \(`scontrol show job "
    with pytest.raises(RankFailure, match=why):
        busy.result(WAIT_S)
    wait_until(lambda: not mesh.alive, WAIT_S, "the mesh has ended")
    with pytest.raises(CellmeshError, match=why):
        mesh.run(abs, -1)
    mesh.stop()


def test_failed_node_costs_its_ranks_and_no_others() -> None:
    with cm.start(launch="slurm", nodes=2, nproc_per_host=1, lease_s=60) as mesh:
        mesh.cell("kept = rank + 5")
        session = mesh.rank_set.session
        try:
            run("scontrol", "update", "nodename=n2", "state=down", "reason=disk")
            wait_until(lambda: session.dead_ranks == {1}, WAIT_S, "rank 1 is lost")
            assert "Slurm: Node failure on n2" in session.why_dead(1)
            assert mesh[0].pull("kept") == 5
            with pytest.raises(HostError, match="n2 is lost, and no agent could be started"):
                mesh.heal()
        finally:
            run("scontrol", "update", "nodename=n2", "state=resume")
    run(sys.executable, "-m", "cellmesh", "ps")  # removes what the killed agent has left


def test_killed_agent_of_the_first_node_takes_no_other_along() -> None:
    with cm.start(launch="slurm", nodes=2, nproc_per_host=1, lease_s=60, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        session = mesh.rank_set.session
        os.kill(mesh[0].run(os.getppid), signal.SIGKILL)  # its agent
        wait_until(lambda: session.dead_ranks == {0}, WAIT_S, "rank 0 is lost")
        assert mesh[1].pull("kept") == 6
        assert mesh.heal(1).respawned == (0,)
        mesh.cell(REDUCE)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"launch_args": "--partition=nosuch"},
            HostError,
            "Slurm refuses the job.*invalid partition",
        ),
        (
            {"nodes": 9, "launch_args": "--immediate=3"},
            HostError,
            "Slurm has not given the nodes in time.*--immediate",
        ),
        ({"nodes": 1, "preload": "no_such_module"}, CellmeshError, "no_such_module"),
    ],
)
def test_start_that_fails_gives_back_what_it_got(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        cm.start(**{"launch": "slurm", "nproc_per_host": 1, "nodes": 2, **options})


def test_node_of_another_job_cannot_join() -> None:
    with cm.start(launch="slurm", nodes=1, nproc_per_host=1, launch_args="--time=5") as mesh:
        with pytest.raises(HostError, match=r"(?s)n2: .*Unable to create step"):
            mesh.resize(hosts="n2:1")
        assert mesh.pull("rank").list == [0]
