"""A notebook on two hosts with two ranks each, by every engine: its losses are those of four ranks
on one host, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tests.exactness.comparing import Losses, difference
from tests.notebooks.kernels import NOTEBOOKS, execute, runtime_directory_of_a_test

from .netns import NOTEBOOK, Host
from .ray import ray_cluster
from .slurm import slurm

# The variable with the losses of each rank.
LOSSES = "losses"
BY_NAME = {path.stem: path for path in NOTEBOOKS}
_START = re.compile(r"(?m)^%dist_start (\d+)(.*)$")
_WAIT_S = 60.0

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Engine:
    """How notebooks are to start their meshes.

    Attributes:
        options: of ``%dist_start``, for two hosts; without the number of ranks on each.
        beside: what has to go on beside a notebook that is given its runtime directory.
    """

    options: str
    beside: Callable[[Path], contextlib.AbstractContextManager[None]] = field(
        default=lambda directory: contextlib.nullcontext()
    )


@contextlib.contextmanager
def _ssh(machines: list[Host]) -> Iterator[Engine]:
    yield Engine("--hosts cm1,cm2")


@contextlib.contextmanager
def _slurm(machines: list[Host]) -> Iterator[Engine]:
    with slurm():
        yield Engine("--launch slurm --nodes 2")


@contextlib.contextmanager
def _ray(machines: list[Host]) -> Iterator[Engine]:
    with ray_cluster(num_nodes=2, num_cpus=2):
        yield Engine("--launch ray --nodes 2")


@contextlib.contextmanager
def _torchrun(machines: list[Host]) -> Iterator[Engine]:
    @contextlib.contextmanager
    def start_agents(directory: Path) -> Iterator[None]:
        """Run torchrun on both hosts for each mesh of the notebook."""
        is_over, started = threading.Event(), dict[Path, list[subprocess.Popen[bytes]]]()

        def watch() -> None:
            while not is_over.wait(0.05):
                for path in directory.glob("cellmesh/*/join.json"):
                    if path not in started and path.stat().st_size:
                        command = _torchrun_command(len(started), path)
                        started[path] = [host.start(*command) for host in machines[:2]]

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            for process in (each for pair in started.values() for each in pair):
                process.wait(_WAIT_S)

    yield Engine(f"--launch torchrun --nodes 2 --address {NOTEBOOK}", start_agents)


def _torchrun_command(number: int, ticket: Path) -> tuple[str, ...]:
    return (
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--max-restarts", "9", "--rdzv-backend", "c10d", "--rdzv-id", f"notebook{number}"),
        *("--rdzv-endpoint", f"cm1:{29400 + number}", "-m", "cellmesh", "agent"),
        *("--ticket", str(ticket)),
    )


ENGINES = {"ssh": _ssh, "slurm": _slurm, "torchrun": _torchrun, "ray": _ray}


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Losses]:
    """Returns a notebook's losses on one host; each notebook is run once."""
    kept = tmp_path_factory.mktemp("one_host") / "losses.json"
    return functools.cache(lambda name: run(name, kept, None))


@pytest.mark.parametrize(
    ("launch", "name"),
    [
        ("slurm", "02_data_parallel"),
        ("torchrun", "02_data_parallel"),
        ("ray", "02_data_parallel"),
        ("ssh", "04_fsdp2"),
    ],
)
def test_losses_on_two_hosts_are_those_on_one(
    launch: str,
    name: str,
    machines: list[Host],
    on_one_host: Callable[[str], Losses],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The number of threads decides in which order a sum is added up.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    theirs = on_one_host(name)
    with ENGINES[launch](machines) as engine:
        ours = run(name, tmp_path / "two_hosts.json", engine)
    assert set(ours) == {0, 1, 2, 3}
    assert all(ours.values()), "there is a rank without losses"
    assert not (parted := difference("on two hosts", ours, "on one", theirs)), parted


def run(name: str, kept: Path, engine: Engine | None) -> Losses:
    """Run a notebook, on two hosts with an engine; return the losses of its four ranks."""
    notebook = nbformat.read(BY_NAME[name], as_version=4)
    tagged = [
        i for i, cell in enumerate(notebook.cells) if "export-here" in cell.metadata.get("tags", ())
    ]
    (place,) = tagged or [len(notebook.cells) - 1]
    added = (
        f"%dist_pull {LOSSES} --all --as exact_losses",
        "import json, pathlib\n"
        "hosts = {each.host for each in mesh.report()}\n"
        "exact = {rank: [float(x).hex() for x in each] for rank, each in exact_losses.items()}\n"
        f"_ = pathlib.Path({str(kept)!r}).write_text(json.dumps([len(hosts), exact]))",
    )
    notebook.cells[place:place] = [new_code_cell(source) for source in added]
    for cell in notebook.cells if engine is not None else ():
        cell.source = _START.sub(
            lambda found: (
                f"%dist_start {engine.options} --nproc-per-host {int(found[1]) // 2} "
                f"--env OMP_NUM_THREADS{found[2]}"
            ),
            cell.source,
        )
    with (
        runtime_directory_of_a_test() as directory,
        engine.beside(directory) if engine is not None else contextlib.nullcontext(),
    ):
        execute(notebook)
    num_hosts, losses = json.loads(kept.read_text())
    assert num_hosts == (1 if engine is None else 2)
    return {int(rank): [float.fromhex(loss) for loss in each] for rank, each in losses.items()}
