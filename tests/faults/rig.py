"""A mesh under test, and the model of what it must hold: state by rank, losses by step."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import zmq

import cellmesh as cm
from cellmesh.controller.core.effects import HealReport
from tests.conftest import clean_runtime_dir, processes_named, processes_of

from .models import DIMS, NUM_RANKS, PRELOAD, SETUP, SETUP_NEW
from .watching import WATCHDOG, Shown, deadline, wait_until

NUM_STEPS = 30
NUM_PROCESSES = 4 + NUM_RANKS  # guardian, agent, zygote, store, ranks
LARGE_BYTES = 300_000
_SETTLE_S = 30.0
# Name of the thread that waits for the end of an agent's parent.
REAPER = "cellmesh-reaper"


@dataclass(frozen=True)
class Losses:
    """What an undisturbed mesh gives: for each step the ranks' losses."""

    ddp: tuple[tuple[tuple[float, str], ...], ...]  # with a digest of the parameters after the step
    fsdp: tuple[tuple[tuple[float, str], ...], ...]  # with a digest of the shards after the step
    tp: tuple[tuple[float, ...], ...]  # of a forward pass


@dataclass
class Kept:
    """What a rank must hold."""

    pid: int
    counter: int
    owner: int


def digest_of(owner: int) -> str:
    """The digest of the tensor that a rank keeps which was first set up as `owner`."""
    tensor = torch.rand(1000, generator=torch.Generator().manual_seed(owner))
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def measure_losses(num_steps: int = NUM_STEPS) -> Losses:
    """Losses of a mesh to which nothing happens."""
    with (
        clean_runtime_dir() as directory,
        deadline(directory, 240, "the undisturbed run"),
        cm.start(NUM_RANKS, mesh=DIMS, preload=PRELOAD) as mesh,
    ):
        mesh.submit_cell(SETUP, sink=Shown()).result()
        # All losses first: a forward pass of `tp` does not depend on the step before.
        found = [
            mesh.pull(f"[{name}(step) for step in range({num_steps})]").list
            for name in ("ddp_step", "fsdp_step", "tp_forward")
        ]
    return Losses(*(tuple(zip(*by_rank, strict=True)) for by_rank in found))


@dataclass
class Rig:
    """A mesh with models in its runtime directory, and what it must hold."""

    mesh: cm.Mesh
    directory: Path
    losses: Losses  # of an undisturbed run
    kept: dict[int, Kept] = field(default_factory=dict)  # by rank
    # model -> the number of its next step
    steps: dict[str, int] = field(default_factory=lambda: {"ddp": 0, "fsdp": 0})
    num_gates: int = 0
    baseline: Level | None = None

    # ---- a mesh's life

    def set_up(self) -> None:
        """Make the models on all ranks, and save the checkpoint that `renew` loads."""
        self.run(SETUP)
        self.adopt()
        self.run(
            f"save_fsdp({self.checkpoint!r})\ninitial = {{k: v.clone() for k, v in "
            "ddp.state_dict().items()}"
        )
        self.verify()
        # The agent opens a rank's log at its first text.
        self.run("os.write(2, b'a line for the log\\n')")
        # As below, in the agent.
        self.mesh.push(large="x" * LARGE_BYTES)
        self.mesh.pull("large")
        self.baseline = self.measure()

    def adopt(self) -> None:
        """Take the ranks as they are after `models.SETUP`."""
        pids = self.mesh.pull("os.getpid()")
        self.kept = {rank: Kept(pids[rank], 0, rank) for rank in range(NUM_RANKS)}

    @property
    def checkpoint(self) -> str:
        """Where `set_up` saves the FSDP model and its optimizer."""
        return str(self.directory / "checkpoint")

    def new_gate(self) -> Path:
        """A path for the next cell's gate."""
        self.num_gates += 1
        return self.directory / f"gate{self.num_gates}"

    def run(self, source: str, ranks: list[int] | None = None) -> None:
        """Run a cell without showing what it prints."""
        chosen = self.mesh if ranks is None else self.mesh[ranks]
        chosen.submit_cell(source, sink=Shown()).result(timeout_s=60)

    # ---- what must be there

    def verify(self) -> None:
        """Every rank holds what it must, and each model's step gives the undisturbed run's loss."""
        self.verify_kept()
        ddp, fsdp = self.steps["ddp"], self.steps["fsdp"]
        if max(ddp, fsdp) >= len(self.losses.ddp):
            self.rewind()
            ddp = fsdp = 0
        got = self.mesh.pull(f"(ddp_step({ddp}), fsdp_step({fsdp}), tp_forward({fsdp}))")
        by_model = zip(*(got[rank] for rank in range(NUM_RANKS)), strict=True)
        all_wanted = (self.losses.ddp[ddp], self.losses.fsdp[fsdp], self.losses.tp[fsdp])
        for name, found, wanted in zip(("DDP", "FSDP2", "TP"), by_model, all_wanted, strict=True):
            assert found == wanted, f"{name}, steps {self.steps}: {found} and not {wanted}"
        self.steps = {"ddp": ddp + 1, "fsdp": fsdp + 1}

    def verify_kept(self) -> None:
        """Every rank is the process it was, and holds what it held, the very same objects."""
        facts = self.mesh.pull("facts()")
        for rank, kept in self.kept.items():
            wanted = {
                "pid": kept.pid,
                "rank": rank,
                "counter": kept.counter,
                "owner": kept.owner,
                "digest": digest_of(kept.owner),
                "changed": [],
            }
            assert facts[rank] == wanted, f"rank {rank} holds {facts[rank]} and not {wanted}"

    def rewind(self) -> None:
        """Back to step 0, from the checkpoint."""
        self.run(
            f"load_fsdp({self.checkpoint!r})\nddp.load_state_dict(initial)\nddp_optimizer.state.clear()"
        )
        self.steps = {"ddp": 0, "fsdp": 0}

    def renew(self, dead: list[int], source: int, at_once: bool = True) -> HealReport:
        """Replace ranks that are dead or new and empty, copy what can be copied to them from
        `source`, make the rest again and load its checkpoint; returns what healed the mesh.

        Heals and copies in one call; unless `at_once`, in two, as somebody would who forgot.
        """
        before = {rank: self.kept[rank].pid for rank in dead}
        first = None if at_once else self.mesh.heal()
        report = self.mesh.heal(source=source)
        if first is not None:
            assert first.respawned == tuple(dead), first
        assert report.copied_to == tuple(dead), report
        assert {"ddp", "ddp_optimizer", "kept"} <= set(report.copied), report
        for name in ("fsdp", "tp"):
            assert "shard" in report.not_copied[name], report
        self.run(SETUP_NEW, dead)
        self.run(f"load_fsdp({self.checkpoint!r})")
        self.steps["fsdp"] = 0
        pids = self.mesh.pull("os.getpid()")
        for rank in dead:
            assert pids[rank] != before[rank]
            self.kept[rank] = dataclasses.replace(self.kept[source], pid=pids[rank])
        return first or report

    # ---- what must not be there

    def check_leftovers(self) -> None:
        """Nothing was added: no process, no descriptor and no thread of controller or agent."""
        wait_until(
            lambda: len(processes_of(self.directory)) == NUM_PROCESSES,
            _SETTLE_S,
            f"{NUM_PROCESSES} processes are to be there, not {processes_of(self.directory)}",
        )
        if self.baseline is None:
            return
        try:
            wait_until(lambda: self.measure().is_within(self.baseline), _SETTLE_S, "descriptors")  # type: ignore[arg-type]
        except AssertionError:
            raise AssertionError(
                f"{self.measure()} is more than {self.baseline}: "
                f"{_describe_descriptors(self._agent())}"
            ) from None

    def measure(self) -> Level:
        """What controller and agent have now."""
        own, agent = psutil.Process(), self._agent()
        threads = [
            thread for thread in threading.enumerate() if thread.name not in (WATCHDOG, REAPER)
        ]
        return Level(own.num_fds(), len(threads), agent.num_fds(), agent.num_threads())

    def _agent(self) -> psutil.Process:
        (agent,) = processes_named(self.directory, "cellmesh-agent")
        return agent


def _describe_descriptors(process: psutil.Process) -> str:
    """What a process has open, and its threads."""
    home = Path(f"/proc/{process.pid}")
    links = []
    for entry in (home / "fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(f"{entry.name}: {os.readlink(entry)}")
    threads = [(task / "comm").read_text().strip() for task in (home / "task").iterdir()]
    return f"{process.cmdline()} has {sorted(links)}, threads {threads}"


@dataclass(frozen=True)
class Level:
    """Descriptors and threads of the controller's process and of the agent."""

    own_fds: int
    own_threads: int
    agent_fds: int
    agent_threads: int

    def is_within(self, bound: Level) -> bool:
        """Whether nothing is more than there."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(bound), strict=True)
        return all(mine <= most for mine, most in pairs)


@contextlib.contextmanager
def open_rig(losses: Losses, lease_s: float = 0.0) -> Iterator[Rig]:
    """A mesh of its own with the models set up; in the end nothing of it may be left."""
    _start_collector()
    own = psutil.Process()
    fds, threads = own.num_fds(), threading.active_count()
    with clean_runtime_dir() as directory:
        with deadline(directory, 90, "the start"):
            mesh = cm.start(NUM_RANKS, mesh=DIMS, preload=PRELOAD, lease_s=lease_s)
            rig = Rig(mesh, directory, losses)
        try:
            with deadline(directory, 60, "the setup", rig.mesh):
                rig.set_up()
            yield rig
        finally:
            with deadline(directory, 30, "the stop"):
                rig.mesh.stop()
    wait_until(
        lambda: own.num_fds() <= fds and threading.active_count() <= threads,
        _SETTLE_S,
        f"this process had {fds} descriptors and {threads} threads and has more: "
        f"{os.listdir('/proc/self/fd')}, {threading.enumerate()}",
    )


def _start_collector() -> None:
    """Have pyzmq start the thread that it has from the first large message on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://large")
        right.connect("inproc://large")
        left.send(bytes(LARGE_BYTES), copy=False)
        right.recv()
    context.term()
