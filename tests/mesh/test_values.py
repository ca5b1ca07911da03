"""Large values to ranks and back: what arrives, whose memory it is, and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import cellmesh as cm
from cellmesh.controller.values import pool
from cellmesh.errors import MeshUsageError
from cellmesh.wire import limits
from cellmesh.wire.segments import MIN_BYTES, held_bytes
from tests.conftest import check_nothing_left

N = 1 << 20  # elements: each value below is larger than what travels in frames
assert N > MIN_BYTES
PLAIN = np.arange(2 * N, dtype=np.float32)
RECORDS = np.zeros(N, dtype=[("a", "i4"), ("b", "f8", (2,))])
RECORDS["a"] = np.arange(N)


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def typed_storage(tensor: torch.Tensor) -> Any:
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True)


class Tagged(torch.Tensor):
    """A subclass."""


ARRAYS: dict[str, Callable[[], Any]] = {
    "C order": lambda: PLAIN.reshape(2, -1),
    "Fortran order": lambda: np.asfortranarray(PLAIN.reshape(2, -1)),
    "every other": lambda: PLAIN[::2],
    "reversed": lambda: PLAIN[::-1],
    "read-only": lambda: read_only(PLAIN),
    "broadcast": lambda: np.broadcast_to(PLAIN[:4], (N, 4)),
    "structured": lambda: RECORDS,
    "objects": lambda: np.array([*range(3), "x" * N], dtype=object),
    "dates": lambda: np.arange(N).astype("M8[s]"),
    "tensor": lambda: torch.arange(N, dtype=torch.int64).reshape(-1, 4),
    "transposed": lambda: torch.arange(N, dtype=torch.float32).reshape(-1, 4).T,
    "part of a storage": lambda: torch.arange(8 * N, dtype=torch.float32)[N : 3 * N : 2],
    "bfloat16": lambda: torch.arange(N).bfloat16(),
    "complex, conjugated": lambda: torch.arange(N).to(torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(N, dtype=torch.float32)),
    "storage": lambda: torch.arange(N, dtype=torch.int64).untyped_storage(),
    "typed storage": lambda: typed_storage(torch.arange(N, dtype=torch.int64)),
    "subclass": lambda: torch.arange(N).as_subclass(Tagged),
    "masked array": lambda: np.ma.masked_array(PLAIN, PLAIN > 5),
    "arrow table": lambda: pa.table({"a": np.arange(N), "b": ["x", None] * (N // 2)}),
    "arrow batch": lambda: pa.RecordBatch.from_pydict({"a": PLAIN}),
    "sparse": lambda: torch.eye(1000).to_sparse(),
    "meta": lambda: torch.empty(N, device="meta"),
    "bytes": lambda: b"ab" * N,
    "bytearray": lambda: bytearray(b"ab" * N),
    "text": lambda: "äb" * N,
    "frame": lambda: pd.DataFrame({"a": np.arange(N), "b": np.ones(N), "c": ["x", "y"] * (N // 2)}),
    "nest": lambda: {"a": [PLAIN, {"b": torch.ones(N)}], "c": (1, "x", b"y" * 2 * N)},
    "module": lambda: torch.nn.Linear(1024, 1024),
}


def digest(value: Any) -> Any:
    """What must be the same on both sides."""
    if isinstance(value, dict):
        return {key: digest(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(digest, value)]
    if isinstance(value, torch.nn.Module):
        return digest(dict(value.state_dict()))
    if isinstance(value, torch.storage.TypedStorage):
        return str(value.dtype), digest(value._untyped_storage)
    if isinstance(value, pa.Table | pa.RecordBatch):
        return type(value).__name__, digest(value.to_pandas())
    if isinstance(value, torch.UntypedStorage):
        return value.nbytes(), digest(torch.tensor([], dtype=torch.uint8).set_(value))  # type: ignore[call-overload]
    if isinstance(value, torch.Tensor):
        kind = (
            type(value).__name__,
            str(value.dtype),
            tuple(value.shape),
            value.requires_grad,
            value.stride,
        )
        if value.is_meta or value.is_sparse:
            return (*kind[:4], value.device.type, digest([*value.to_dense().shape]))
        data = value.detach().resolve_conj().contiguous().view(torch.uint8).numpy()
        return (*kind[:4], hashlib.sha1(data.tobytes()).hexdigest())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return str(value.dtype), value.shape, hashlib.sha1(value.tobytes()).hexdigest()
    if isinstance(value, pd.DataFrame):
        return {str(name): digest(column.to_list()[:100]) for name, column in value.items()}
    return type(value).__name__, hashlib.sha1(pickle.dumps(value)).hexdigest()


@pytest.mark.parametrize("kind", ARRAYS)
def test_pushed_run_and_pulled_values_are_equal(quick: cm.Mesh, kind: str) -> None:
    value = ARRAYS[kind]()
    expected = digest(value)
    quick.push(x=value)
    assert quick.run(digest, value).list == [expected] * 2
    assert [digest(each) for each in quick.pull("x").list] == [expected] * 2


@pytest.mark.parametrize(
    "value", [PLAIN.copy(), torch.from_numpy(PLAIN.copy())], ids=["array", "tensor"]
)
def test_each_rank_has_memory_of_its_own(quick: cm.Mesh, value: Any) -> None:
    quick.push(x=value)
    quick.cell("x[0] = rank + 5; x[-1] += 1")
    assert quick.pull("float(x[0]), float(x[-1])").list == [(5.0, 2.0 * N), (6.0, 2.0 * N)]
    assert (float(value[0]), float(value[-1])) == (0, 2 * N - 1)
    pulled = quick.pull("x")
    pulled[0][0] = 77
    assert [*quick.pull("float(x[0])").list, float(pulled[1][0])] == [5.0, 6.0, 6.0]


def free_segments(mesh: cm.Mesh) -> list[Any]:
    return mesh.rank_set.session.segments._free


def wait_for(is_so: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "keep",
    [
        "kept = x",
        "kept = x[5:]",
        "kept = torch.from_numpy(x)",
        "import os, signal; pid = os.fork() or signal.pause()",
    ],
    ids=["name", "view", "tensor", "child"],
)  # fmt: skip
def test_memory_that_ranks_use_is_not_written_again(own_mesh: cm.Mesh, keep: str) -> None:
    mesh, name = own_mesh, own_mesh.name
    value = np.zeros(2 * N, dtype=np.int64)
    mesh.push(x=value)
    mesh[0].cell(keep)
    for number in range(1, 6):
        mesh.push(x=value + number)
        wait_for(lambda: number == 1 or free_segments(mesh))  # noqa: B023
    if "fork" in keep:
        mesh[0].cell("import signal; os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0); kept = [0]")
    assert mesh[0].pull("max(kept)") == 0
    assert mesh.pull("int(x[0])").list == [5, 5]
    sizes = held_bytes(
        os.getpid(), name
    )  # one is used, one is free, and one that `kept` is in may be
    assert len(sizes) <= 3
    assert min(sizes) >= value.nbytes
    mesh.restart()
    assert held_bytes(os.getpid(), name) == []


def test_segments_that_wait_are_bounded(own_mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_FREE_PART", 0.0)
    monkeypatch.setattr(pool, "MAX_SEGMENTS", 2)
    for number in range(4):
        own_mesh.push(**{f"x{number}": PLAIN})
    assert len(held_bytes(os.getpid(), own_mesh.name)) == 2
    own_mesh.cell("del x0, x1, x2, x3")
    wait_for(lambda: not held_bytes(os.getpid(), own_mesh.name))


@contextlib.contextmanager
def limited(which: int, num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def test_too_large_push_is_refused_before_anything_is_lost(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.push(x=1)
    with (
        limited(resource.RLIMIT_FSIZE, N),
        pytest.raises(MeshUsageError, match=r"75.5 MB .*RLIMIT_FSIZE"),
    ):
        quick.push(x=PLAIN.copy(), y=np.ones(64 * N, "u1"))
    quick.cell(
        "import resource; soft, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))"
    )
    with pytest.raises(cm.RankFailure, match=r"a value of 134.2 MB cannot be mapped.*RLIMIT_AS"):
        quick.push(x=np.zeros(128 << 20, "u1"))
    quick.cell("resource.setrlimit(resource.RLIMIT_AS, (soft, hard))")
    monkeypatch.setattr(limits, "free_bytes", lambda: 4 * N)
    with pytest.raises(MeshUsageError, match=r"268.4 MB does not fit: 4.2 MB of memory are free"):
        quick.run(len, np.zeros(256 * N, "u1"))
    assert quick.pull("x").list == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.broadcast_to(np.zeros(1, "u1"), (1 << 40,)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,))[::2],
        lambda: torch.zeros(1 << 28, dtype=torch.uint8)[: 100 << 20],
        lambda: bytes(100 << 20),
        lambda: bytearray(100 << 20),
        lambda: ["x" * (100 << 20)],
    ],
    ids=["broadcast", "strided", "part", "bytes", "bytearray", "text"],
)
def test_value_too_large_to_copy_is_refused_before_the_copy(
    quick: cm.Mesh, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.push(x=1)
    value = make()
    monkeypatch.setattr(limits, "free_bytes", lambda: 4 << 20)
    with pytest.raises(
        MeshUsageError, match=r"'x'.* does not fit: 4.2 MB of memory are free"
    ) as caught:
        quick.push(x=value)
    assert "MemoryError" not in str(caught.value)
    with pytest.raises(MeshUsageError, match=r"argument 0 of len.* does not fit"):
        quick.run(len, value)
    assert quick.pull("x").list == [1, 1]


def test_a_rank_killed_before_it_takes_a_push_costs_the_others_nothing(own_mesh: cm.Mesh) -> None:
    pids = [info.pid for info in own_mesh.report()]
    busy = own_mesh[1].submit(time.sleep, 600)
    pushing = own_mesh.submit(lambda value: globals().update(x=value) or value.nbytes, PLAIN)
    next(iter(pushing))
    os.kill(pids[1], signal.SIGKILL)
    for run in (busy, pushing):
        with pytest.raises(cm.RankFailure, match="rank 1"):
            run.result()
    own_mesh.push(y=PLAIN) if own_mesh.heal() else None
    assert own_mesh.pull("y.nbytes").list == [PLAIN.nbytes] * 2


class EndsRank1:
    """Ends rank 1 while it takes the value in."""

    def __reduce__(self) -> Any:
        code = (
            "__import__('os').environ['RANK'] == '1' and "
            "__import__('os').kill(__import__('os').getpid(), 9)"
        )
        return eval, (code,)


def test_a_rank_killed_while_it_takes_a_push_costs_the_others_nothing(own_mesh: cm.Mesh) -> None:
    own_mesh.push(x=0)
    with pytest.raises(cm.RankFailure, match="rank 1 was killed by SIGKILL"):
        own_mesh.push(x=[PLAIN, EndsRank1(), PLAIN + 1])
    assert own_mesh[0].pull("x[0].nbytes, float(x[2][0])") == (PLAIN.nbytes, 1.0)
    own_mesh.heal()
    own_mesh.push(y=-PLAIN)  # not where rank 0 still has the other one
    assert own_mesh[0].pull("float(x[0][7])") == 7.0
    assert own_mesh.pull("float(y[7])").list == [-7.0] * 2


def test_segments_that_wait_go_before_a_value_is_refused(
    own_mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_mesh.push(x=PLAIN)
    own_mesh.push(x=1)
    wait_for(lambda: free_segments(own_mesh))
    free = iter([N, 1 << 50])
    monkeypatch.setattr(limits, "free_bytes", lambda: next(free))
    own_mesh.push(y=np.zeros(4 * PLAIN.nbytes, "u1"))
    assert free_segments(own_mesh) == []


def test_work_that_waits_outlives_the_memory_of_the_notebook(own_mesh: cm.Mesh) -> None:
    """The agent has what is under way: a controller that goes takes nothing along."""
    gate = own_mesh[1].submit(signal.pause)
    waiting = own_mesh[1].submit(lambda value: float(value.sum()), np.ones(2 * N))
    wait_for(lambda: own_mesh.rank_set.session.segments._loans)
    own_mesh.states()  # the agent has passed on what was sent before
    own_mesh.rank_set.session.segments.clear()
    gate.interrupt()
    with contextlib.suppress(KeyboardInterrupt):
        gate.result()
    assert waiting.result() == 2.0 * N


def peak_bytes(of: str) -> int:
    """A process's largest resident memory since `forget_peak`."""
    status = Path(f"/proc/{of}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak(of: str = "self") -> int:
    Path(f"/proc/{of}/clear_refs").write_text("5")
    return peak_bytes(of)


def test_the_peak_of_results_is_one_copy(runtime_dir: Path) -> None:
    num_bytes, num_ranks = 256 << 20, 8
    with cm.start(num_ranks) as mesh:
        mesh.cell(f"x = torch.full(({num_bytes},), rank, dtype=torch.uint8)")
        agent = str(cm_agent(mesh))
        earlier = mapped_results()  # of other tests
        before = mesh.run(forget_peak).list, forget_peak(), forget_peak(agent)
        values = mesh.pull("x")
        after = mesh.run(peak_bytes, "self").list, peak_bytes("self"), peak_bytes(agent)
        assert len(mapped_results() - earlier) == num_ranks
    grown = sum(after[0]) - sum(before[0]) + sum(after[1:]) - sum(before[1:])
    print(f"beside the copy, the peak grew by {grown / (num_ranks * num_bytes):.1%}")
    assert grown < 0.1 * num_ranks * num_bytes
    assert [int(value[-1]) for value in values.list] == list(range(num_ranks))


def cm_agent(mesh: cm.Mesh) -> int:
    return mesh.rank_set.session._launcher._agent.pid


def mapped_results() -> set[int]:
    """The inodes of the results that this process maps."""
    return {os.stat(f"/proc/self/map_files/{name}").st_ino for name in mapped("cellmesh-result")}


def mapped(name: str) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in maps if name in line]


PULLING = f"""
import cellmesh as cm
if __name__ == "__main__":
    mesh = cm.start(2, lease_s=60, name="pulling")
    mesh.cell("x = torch.full(({64 * N},), rank, dtype=torch.uint8)")
    while True:
        mesh.pull("x", gather=True)
        print("gathered", flush=True)
"""


def memfds_of(pid: int) -> list[str]:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return [link for link in links if link.startswith("/memfd:")]


def test_a_notebook_killed_while_it_gathers_leaves_nothing_behind(
    runtime_dir: Path, tmp_path: Path
) -> None:
    script = tmp_path / "pulling.py"
    script.write_text(PULLING)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None
        for _ in range(3):
            assert notebook.stdout.readline() == "gathered\n"
        notebook.kill()
    # The agent may not have noticed the end of the notebook yet.
    with cm.attach("pulling", steal=True) as mesh:
        gathered = mesh.pull("x", gather=True)
        assert gathered.shape == (128 * N,)
        assert [int(gathered[0]), int(gathered[-1])] == [0, 1]
        processes = [cm_agent(mesh), *(info.pid for info in mesh.report())]
        wait_for(lambda: not any(map(memfds_of, processes)))
    check_nothing_left(runtime_dir)
