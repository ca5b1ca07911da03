"""What a machine with one GPU shows: ranks that share it over gloo, NCCL on one rank, and its
memory.

Tests without the mark `gpu` run on the CPU where there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

import cellmesh as cm
from tests.conftest import check_nothing_left, process_named
from tests.mesh.conftest import Recorder
from tests.notebooks.kernels import NOTEBOOKS, execute, runtime_directory_of_a_test

from .conftest import DEVICE_TYPE, NUM_GPUS, Note, needs_gpus

WAIT_S = 60.0
ON_GPU = [pytest.mark.gpu, needs_gpus(1)]

MODELS = """
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
ddp = DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device),
    device_ids=[device] if device.type == "cuda" else None,
)
fsdp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
for layer in (fsdp[0], fsdp[2], fsdp):
    fully_shard(layer, mesh=mesh)
make = lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
optimizers = {model: make(model) for model in (ddp, fsdp)}
losses = []

def step(number, models=(ddp, fsdp)):
    for model in models:
        generator = torch.Generator().manual_seed(100 * number + rank)
        loss = model(torch.randn(8, 16, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        losses.append(loss.item())
"""
WAIT_FOR_RANK_1 = "one = torch.ones(4, device=device)\nif rank != 1: dist.all_reduce(one)\nelse: {}"


def train(mesh: cm.Mesh, between: Callable[[], None] | None = None) -> list[list[float]]:
    """Losses by rank of four steps of new models; `between` is called after the second."""
    mesh.cell(MODELS)
    mesh.cell("step(0); step(1)")
    if between is not None:
        between()
    mesh.cell("step(2); step(3)")
    return mesh.pull("losses").list


def gpu_memory_mib() -> int:
    """What is in use on all GPUs."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return sum(map(int, done.stdout.split()))


def wait_for_memory(most_mib: int) -> int:
    """Until no more than this is in use; fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while (used := gpu_memory_mib()) > most_mib:
        assert time.monotonic() < deadline, (
            f"{used} MiB are in use, {most_mib} MiB expected at most"
        )
    return used


@contextlib.contextmanager
def started(directory: Path, num_ranks: int, backend: str) -> Iterator[cm.Mesh]:
    """A mesh that a test harms; nothing is left of it."""
    with cm.start(num_ranks, backend=backend) as mesh:
        yield mesh
    check_nothing_left(directory)


def raised_by(caught: pytest.ExceptionInfo[cm.RankFailure], rank: int) -> BaseException:
    return caught.value.exceptions_by_rank[rank]


def test_ranks_share_the_gpus(mesh: cm.Mesh, note: Note) -> None:
    devices = mesh.pull("str(device)").list
    expected = [f"cuda:{rank % NUM_GPUS}" for rank in range(4)] if NUM_GPUS else ["cpu"] * 4
    assert devices == expected
    mesh.cell("t = torch.full((4,), float(rank), device=device); dist.all_reduce(t)")
    assert mesh.pull("t.tolist()").list == [[6.0] * 4] * 4
    note(f"ranks 0-3 on {', '.join(devices)}")


@pytest.mark.parametrize("what_happens", ["rank 1 raises", "the stop button"])
def test_ddp_and_fsdp2_step_on_after(
    mesh: cm.Mesh, recorder: Recorder, note: Note, what_happens: str
) -> None:
    def fail() -> None:
        with pytest.raises(cm.RankFailure) as caught:
            mesh.cell(WAIT_FOR_RANK_1.format("1 / 0"))
        assert isinstance(raised_by(caught, 1), ZeroDivisionError)
        assert all(isinstance(raised_by(caught, rank), cm.Released) for rank in (0, 2, 3))

    def stop() -> None:
        work = (
            "print('busy', flush=True)\n    while True: one = (one @ one.T).expand(4).contiguous()"
        )
        run = mesh.submit_cell(WAIT_FOR_RANK_1.format(f"\n    {work}"), sink=recorder)
        recorder.wait_for_line("busy")
        run.interrupt()
        with pytest.raises((cm.RankFailure, KeyboardInterrupt)):
            run.result(WAIT_S)

    undisturbed = train(mesh)
    assert train(mesh, fail if what_happens == "rank 1 raises" else stop) == undisturbed
    note(
        f"losses of 4 steps equal an undisturbed run's bit for bit; the last: {undisturbed[0][-2:]}"
    )


def test_ddp_steps_on_after_a_death(runtime_dir: Path, note: Note) -> None:
    with started(runtime_dir, 3, "gloo") as mesh:
        undisturbed = [losses[::2] for losses in train(mesh)]
        mesh.cell(MODELS.replace("fully_shard(layer, mesh=mesh)", "pass"))
        mesh.cell("step(0, (ddp,)); step(1, (ddp,))")
        os.kill(mesh.report()[1].pid, signal.SIGKILL)
        with pytest.raises((cm.RankDied, cm.RankFailure)):
            mesh.cell("step(2, (ddp,))")
        report = mesh.heal(source=0)
        assert report.copied_to == (1,)
        mesh.cell("del losses[2:]; step(2, (ddp,)); step(3, (ddp,))")
        healed = mesh.pull("losses").list
        assert [healed[0], healed[2]] == [undisturbed[0], undisturbed[2]]
        assert healed[1][2:] == undisturbed[1][2:]
        note("rank 1 was killed and replaced, rank 0's names copied to it; the same losses follow")


def test_weights_are_copied_between_devices(mesh: cm.Mesh, note: Note) -> None:
    mesh.cell(MODELS)
    mesh.cell("plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)")
    mesh.cell("step(0, (fsdp,))")
    mesh.copy("fsdp", to=mesh[1:], into="plain").result()
    whole = mesh.pull("[p.full_tensor().tolist() for p in fsdp.parameters()]").list
    assert mesh.pull("[p.tolist() for p in plain.parameters()]").list[1:] == whole[1:]
    note("FSDP2's parameters on ranks 0-3 are those of a plain model on ranks 1-3, after a copy")


def test_the_inspector_and_memory_of_tensors_on_the_device(mesh: cm.Mesh, note: Note) -> None:
    mesh.cell("held = torch.arange(1 << 20, dtype=torch.float32, device=device) + rank")
    facts = mesh.inspect("held")
    assert facts[2].device.startswith(DEVICE_TYPE)
    assert (facts[2].min, facts[2].max) == (2.0, float(2**20 + 1))
    memory = mesh.states()[2].memory
    assert memory.rss > 0
    if NUM_GPUS:
        assert memory.allocated >= 4 << 20
        assert memory.cell_allocated >= 4 << 20
    note(f"{facts[2].dtype} on {facts[2].device}: min {facts[2].min}, max {facts[2].max}")
    note(f"%dist_mem of rank 2: {memory.allocated / 1e6:.1f} MB allocated on a GPU")


class TestOnGpu:
    """What has no counterpart on the CPU."""

    pytestmark = ON_GPU

    def test_the_quickstart_trains(self, note: Note) -> None:
        (path,) = (path for path in NOTEBOOKS if path.stem == "01_quickstart")
        notebook = nbformat.read(path, as_version=4)
        with runtime_directory_of_a_test():
            execute(notebook)
        outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
        lines = "".join(out.get("text", "") for out in outputs).splitlines()
        for words in ("4 ranks on cuda", "weights equal on 4 ranks"):
            note(next(line for line in lines if words in line).strip())

    def test_the_zygote_has_no_cuda_context(self, runtime_dir: Path, note: Note) -> None:
        def uses_cuda(pid: int) -> bool:
            links = []
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    links.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
            return "/dev/nvidia-uvm" in links  # opened by a context, and not by NVML

        with started(runtime_dir, 2, "gloo") as mesh:
            mesh.cell("x = torch.ones(8, device=device)")
            pids = {
                name: process_named(runtime_dir, f"cellmesh-{name}").pid
                for name in ("agent", "zygote", "store")
            }
            found = {name: uses_cuda(pid) for name, pid in pids.items()}
            ranks = [uses_cuda(info.pid) for info in mesh.report()]
        assert ranks == [True, True]
        assert not any(found.values()), found
        note("/dev/nvidia-uvm is open in both ranks, and not in agent, zygote and store")

    def test_memory_is_freed_after_a_kill_and_after_stop(
        self, runtime_dir: Path, note: Note
    ) -> None:
        before = gpu_memory_mib()
        with started(runtime_dir, 2, "gloo") as mesh:
            mesh.cell("held = torch.empty(1 << 30, dtype=torch.uint8, device=device).fill_(1)")
            held = gpu_memory_mib()
            assert held > before + 2048
            os.kill(mesh.report()[1].pid, signal.SIGKILL)
            killed = wait_for_memory(held - 1024)
            mesh.heal()
        stopped = wait_for_memory(before + 64)
        note(f"MiB in use: {before} before, {held} with 1 GiB on each of 2 ranks")
        note(f"MiB in use: {killed} after the kill of a rank, {stopped} after stop")

    def test_out_of_memory_costs_a_cell(self, mesh: cm.Mesh, note: Note) -> None:
        pids = [info.pid for info in mesh.report()]
        with pytest.raises(cm.RankFailure) as caught:
            mesh.cell(
                WAIT_FOR_RANK_1.format("torch.empty(1 << 50, dtype=torch.uint8, device=device)")
            )
        assert "out of memory" in str(raised_by(caught, 1))
        assert isinstance(raised_by(caught, 0), cm.Released)
        train(mesh)
        assert [info.pid for info in mesh.report()] == pids
        note(f"{type(raised_by(caught, 1)).__name__}; the next cells train on the same ranks")

    def test_a_device_side_assert_costs_its_rank(self, runtime_dir: Path, note: Note) -> None:
        with started(runtime_dir, 3, "gloo") as mesh:
            mesh.cell("kept = torch.full((4,), float(rank), device=device)")
            index = (
                "torch.zeros(4, device=device)[torch.tensor([7], "
                "device=device)]; torch.cuda.synchronize()"
            )
            with pytest.raises(cm.RankFailure, match="device-side assert"):
                mesh.cell(WAIT_FOR_RANK_1.format(index))
            with pytest.raises((cm.RankFailure, cm.RankDied)) as caught:
                mesh.cell("kept.sum()")
            error = caught.value
            died = error.exceptions_by_rank[1] if isinstance(error, cm.RankFailure) else error
            assert "its CUDA context is lost" in str(died)
            mesh.heal()
            mesh[1].cell("kept = torch.full((4,), 1.0, device=device)")
            mesh.cell("dist.all_reduce(kept)")
            assert mesh.pull("kept.tolist()").list == [[3.0] * 4] * 3
            note(str(died).splitlines()[-2].strip())

    def test_nccl_on_one_rank_is_aborted_and_rebuilt(self, runtime_dir: Path, note: Note) -> None:
        with started(runtime_dir, 1, "nccl") as mesh:
            assert mesh[0].pull("dist.group.WORLD._get_backend(device).name()") == "nccl"
            undisturbed = train(mesh)

            def abort() -> None:
                with pytest.raises(cm.RankFailure):
                    mesh.cell(
                        "dist.all_reduce(torch.ones(4, device=device))\n"
                        "dist.group.WORLD.cut()\n"
                        "dist.all_reduce(torch.ones(4, device=device))\n"
                        "torch.cuda.synchronize()\n"
                        "raise RuntimeError('torch let an aborted communicator pass')"
                    )

            assert train(mesh, abort) == undisturbed
            note("DDP and FSDP2: the communicator was aborted, losses equal an undisturbed run's")

    def test_nccl_is_interrupted(self, runtime_dir: Path, recorder: Recorder, note: Note) -> None:
        with started(runtime_dir, 1, "nccl") as mesh:
            undisturbed = train(mesh)

            def stop() -> None:
                source = (
                    "print('busy', flush=True)\nwhile True:\n    torch.cuda._sleep(50_000_000)\n  "
                    "  dist.all_reduce(torch.ones(4, device=device))\n    torch.cuda.synchronize()"
                )
                run = mesh.submit_cell(source, sink=recorder)
                recorder.wait_for_line("busy")
                run.interrupt()
                with pytest.raises((cm.RankFailure, KeyboardInterrupt)):
                    run.result(WAIT_S)

            assert train(mesh, stop) == undisturbed
            note("a loop of all_reduce and synchronize was stopped; the same models step on")
