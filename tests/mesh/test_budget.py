"""What a call and a cell may cost, counted: Python function calls and system calls, not seconds.

Each number is the least of many calls in steady state, with one rank: what happens now and then (a
timer, an acknowledgement) is not in it. Whoever raises a budget says in the commit what for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ipykernel  # noqa: F401  # as in a notebook, which has both
import IPython  # noqa: F401
import pytest

import cellmesh as cm
from tests.conftest import clean_runtime_dir, process_named

from .test_preload import wait_until_loaded
from .test_prestart import prestarting, start, stop

NUM_CALLS = 100
NUM_ROUNDS = 20
# Python function calls, of libraries too (cloudpickle has 67 more in a call that needs it); the
# controller's on the caller's thread and on the link's. The controller has 114 and 122 where the
# agent's receipt arrives together with the ranks' answer: else its loop has one turn or two more.
# The agent has 71, 74 or 80, as messages arrive together or one by one, also in the least of 2,000.
PYTHON_CALLS = {
    "call": {"controller": 131, "agent": 80, "rank": 19},
    "cell": {"controller": 139, "agent": 80, "rank": 36},
}
MODULES = {"call": 20, "cell": 21}  # of cellmesh, in the controller
# System calls of these threads, but for futexes. Controller and agent need 20 and 15 on a quiet
# machine; on a busy one ZeroMQ looks at its descriptors more often.
SYSTEM_CALLS = {
    "call": {"controller": 26, "agent": 20, "rank": 4},
    "cell": {"controller": 26, "agent": 20, "rank": 6},
}
# Read by every interpreter that starts: the agent's counts from one order that it relays to the
# next.
SITE = """
import sys
if any("cellmesh.workers.agent.guardian" in word for word in sys.orig_argv):
    sys.path.insert(0, PACKAGE_PARENT)
    import os, mmap
    from tests.mesh.test_budget import Counter
    file = os.open(COUNTS, os.O_RDWR)
    sys.setprofile(Counter("Supervisor.relay", mmap.mmap(file, 8)))
"""
# A rank notes the modules that the zygote has.
NOTE_AT_FORK = """
import os, sys
os.register_at_fork(after_in_child=lambda: setattr(sys, "at_fork", set(sys.modules)))
"""


class Counter:
    """A profile function: the least number of Python calls from one call of a function to its next.

    Args:
        marker: the function's qualified name.
        shared: where it is written to, as a double word; one of 0 makes it begin again.
    """

    def __init__(self, marker: str, shared: Any) -> None:
        self._marker, self._shared = marker, shared
        self._num, self._has_begun = 0, False

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self._num += 1
            if frame.f_code.co_qualname == self._marker:
                (least,) = struct.unpack_from("<q", self._shared)
                if self._has_begun and (least < 1 or self._num < least):
                    struct.pack_into("<q", self._shared, 0, self._num)
                self._num, self._has_begun = 0, True


def noop() -> None:
    """What every rank is asked to do; it travels by value, as what is typed into a notebook."""


noop.__module__ = "__main__"


def count_on_rank(marker: str | None) -> int:
    """Begin to count on the rank's main thread, or end it; the least so far."""
    shared = vars(sys.modules[__name__]).setdefault("SHARED", bytearray(8))
    (least,) = struct.unpack_from("<q", shared)
    struct.pack_into("<q", shared, 0, 0)
    sys.setprofile(None if marker is None else Counter(marker, shared))
    return int(least)


Work = Callable[[], Any]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[cm.Mesh, Path, Path]]:
    """One rank, whose agent counts in a file; and the runtime directory."""
    directory = tmp_path_factory.mktemp("site")
    counts = directory / "counts"
    counts.write_bytes(bytes(8))
    site = SITE.replace("PACKAGE_PARENT", repr(str(Path(cm.__file__).parents[1])))
    (directory / "sitecustomize.py").write_text(site.replace("COUNTS", repr(str(counts))))
    with clean_runtime_dir() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        with cm.start(1) as mesh:
            yield mesh, counts, runtime


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[cm.Mesh, Path]]:
    """One rank, and nobody counts."""
    with clean_runtime_dir() as runtime, cm.start(1) as mesh:
        yield mesh, runtime


def work_of(mesh: cm.Mesh, what: str) -> Work:
    work: Work = (lambda: mesh.run(noop)) if what == "call" else lambda: mesh.cell("pass")
    for _ in range(50):
        work()
    return work


@pytest.mark.parametrize("what", PYTHON_CALLS)
def test_python_calls(what: str, counted: tuple[cm.Mesh, Path, Path]) -> None:
    mesh, counts, _ = counted
    work, shared = work_of(mesh, what), bytearray(8)
    mesh.run(count_on_rank, "Executor.execute")
    counts.write_bytes(bytes(8))
    with profiled(mesh, Counter("Runs.start_run", shared)):
        for _ in range(NUM_ROUNDS * NUM_CALLS):
            work()
    (controller,) = struct.unpack_from("<q", shared)
    (agent,) = struct.unpack_from("<q", counts.read_bytes())
    (rank,) = mesh.run(count_on_rank, None).values()
    check(
        what,
        "Python calls",
        {"controller": controller, "agent": agent, "rank": rank},
        PYTHON_CALLS[what],
    )


@pytest.mark.parametrize("what", SYSTEM_CALLS)
def test_system_calls(what: str, plain: tuple[cm.Mesh, Path], tmp_path: Path) -> None:
    assert shutil.which("strace"), "this test needs strace: apt-get install strace"
    mesh, runtime = plain
    work = work_of(mesh, what)
    (rank_pid,) = mesh.pull("__import__('os').getpid()").values()
    agent_pid = process_named(runtime, "cellmesh-agent").pid
    found = {}
    # In each process one system call comes once a call; the controller's is its own, for this.
    link = mesh.rank_set.session._link._thread.native_id
    assert link is not None
    for name, tids, marker in (
        ("controller", (threading.get_native_id(), link), "getppid("),
        ("agent", (agent_pid,), "sendto("),
        ("rank", (rank_pid,), "sendmsg("),
    ):
        with traced(tids, tmp_path / f"{what}-{name}") as trace:
            for _ in range(NUM_CALLS):
                os.getppid()
                work()
        found[name] = least_between(trace.read_text(), marker) - (name == "controller")
    check(what, "system calls", found, SYSTEM_CALLS[what])


@pytest.mark.parametrize("what", MODULES)
def test_modules(what: str, plain: tuple[cm.Mesh, Path]) -> None:
    """The modules of cellmesh that one call passes in the controller."""
    mesh, _ = plain
    work, passed = work_of(mesh, what), set[str]()
    fewest: set[str] | None = None

    def note(frame: Any, event: str, arg: Any) -> None:
        if frame.f_globals.get("__name__", "").startswith("cellmesh."):
            passed.add(frame.f_globals["__name__"])

    with profiled(mesh, note):
        for _ in range(NUM_CALLS):
            passed.clear()
            work()
            if fewest is None or len(passed) < len(fewest):
                fewest = passed.copy()
    assert fewest is not None
    assert len(fewest) <= MODULES[what], sorted(fewest)


@pytest.mark.usefixtures("starts_cold")
def test_a_rank_that_starts_imports_nothing(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_AT_FORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with cm.start(1) as mesh:
        new = "sorted({*__import__('sys').modules} - __import__('sys').at_fork)"
        assert mesh[0].pull(new) == []


@contextlib.contextmanager
def profiled(mesh: cm.Mesh, function: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Have a function profile this thread and that of the mesh's link."""

    def profile_link(function: Callable[[Any, str, Any], None] | None) -> None:
        done = threading.Event()

        def begin(core: Any, now: float) -> tuple[()]:
            sys.setprofile(function)
            done.set()
            return ()

        mesh.rank_set.session._link.post(begin)
        assert done.wait(30)

    before = sys.getprofile()
    profile_link(function)
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(before)
        profile_link(None)


@contextlib.contextmanager
def traced(tids: Sequence[int], path: Path) -> Iterator[Path]:
    """Have threads traced, by their numbers."""
    wanted = [word for tid in tids for word in ("-p", str(tid))]
    command = ["strace", "--trace=!futex", "-o", str(path), *wanted]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        for _ in tids:
            first = strace.stderr.readline()
            assert "attached" in first, first
        try:
            yield path
        finally:
            strace.terminate()
            strace.stderr.read()


def least_between(trace: str, marker: str) -> int:
    """The least number of system calls from one that begins like this to the next."""
    names = re.findall(r"^(?:\d+ +)?(\w+\()", trace, re.MULTILINE)
    places = [index for index, name in enumerate(names) if name == marker]
    assert len(places) > NUM_CALLS / 2, names[-50:]
    return min(later - earlier for earlier, later in itertools.pairwise(places))


def check(what: str, unit: str, found: dict[str, int], budget: dict[str, int]) -> None:
    print(f"{unit} of one {what}: {found}")
    over = {
        name: f"{number}, of {budget[name]}"
        for name, number in found.items()
        if number > budget[name]
    }
    assert all(found.values()), found
    assert not over, f"{unit} of one {what}: {over}"


# ---- modules that a rank imports in its first cells, after a warm start

FIRST_CELLS = """%%dist
import json
import sys
import torch.nn.functional as F

def batch(model):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss

def ddp():
    batch(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)))

def fsdp2():
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch(model)
    optimizer.step()
    return model, optimizer

def tp():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    batch(parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel()))

def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, world_size, device)
    schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
    schedule.step(*[torch.ones(4, 4)] * (rank == 0), target=torch.ones(4, 4))

def context_parallel():
    from torch.distributed.tensor.experimental import context_parallel

def checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    for state in get_state_dict(*fsdp2()):
        dcp.save(state, checkpoint_id=FOLDER)
        dcp.load(state, checkpoint_id=FOLDER)

def optimizers():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop,
                 torch.optim.NAdam, torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor):
        model = torch.nn.Linear(4, 4, bias=False)
        kind(model.parameters()).step(lambda: batch(model))
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam).step()

def recompute():
    from torch.utils.checkpoint import checkpoint
    with torch.autocast("cpu", torch.bfloat16):
        batch(lambda x: checkpoint(torch.nn.Linear(4, 4), x, use_reentrant=False))

def compile():
    batch(torch.compile(torch.nn.Linear(4, 4), backend="aot_eager"))
    from torch._inductor import compile_fx

def failure():
    try:
        1 / 0
    except ZeroDivisionError as error:
        assert "1 / 0" in get_ipython().show_traceback(error)

imported = {}
for first in (fsdp2, ddp, tp, pipeline, context_parallel, checkpoint, optimizers, recompute,
              compile, failure):
    before = set(sys.modules)
    first()
    imported[first.__name__] = sorted(set(sys.modules) - before)
print(json.dumps(imported))
"""
# torch.compile's backends import 23 more, which take 13 ms.
MODULES_OF_FIRST_CELLS = {"compile": 25}


def test_modules_of_first_cells(runtime_dir: Path, tmp_path: Path) -> None:
    with prestarting(tmp_path / "notebook") as notebook:
        wait_until_loaded()
        start(notebook)
        cell = FIRST_CELLS.replace("FOLDER", repr(str(tmp_path / "checkpoint")))
        imported = json.loads(notebook.run(cell).text().removeprefix("[0-1] "))
        stop(notebook)
    for name, modules in imported.items():
        assert len(modules) <= MODULES_OF_FIRST_CELLS.get(name, 0), (name, modules)
