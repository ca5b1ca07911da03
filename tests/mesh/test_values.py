"""Large values to ranks and back: what arrives, whose memory it is, and what is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError
from cellmesh.wire import limits
from cellmesh.wire.segments import MIN_BYTES, memfd_name

N = 1 << 20  # elements: each value below is larger than what travels in frames
assert N > MIN_BYTES
PLAIN = np.arange(2 * N, dtype=np.float32)


class Tagged(torch.Tensor):
    """A subclass."""


VALUES: dict[str, Any] = {
    "Fortran order": np.asfortranarray(PLAIN.reshape(2, -1)),
    "broadcast": np.broadcast_to(PLAIN[:4], (N, 4)),
    "objects": np.array([*range(3), "x" * N], dtype=object),
    "part of a storage": torch.arange(8 * N, dtype=torch.float32)[N : 3 * N : 2],
    "complex, conjugated": torch.arange(N).to(torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.arange(N, dtype=torch.float32)),
    "subclass": torch.arange(N).as_subclass(Tagged),
    "arrow table": pa.table({"a": np.arange(N), "b": ["x", None] * (N // 2)}),
    "frame": pd.DataFrame({"a": np.arange(N), "c": ["x", "y"] * (N // 2)}),
    "nest": {"a": [PLAIN, {"b": torch.ones(N)}], "c": (1, "äb" * N, b"y" * 2 * N)},
}


def is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        kinds = [(each.dtype, each.requires_grad) for each in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one.equals(other) if hasattr(one, "equals") else one == other)


@pytest.mark.parametrize("kind", VALUES)
def test_pushed_run_and_pulled_values_are_equal(quick: cm.Mesh, kind: str) -> None:
    value = VALUES[kind]
    quick.push(x=value)
    results = *quick.pull("x").list, *quick.run(lambda given: given, value).list
    assert [is_same(each, value) for each in results] == [True] * 4


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


@pytest.mark.parametrize(
    "keep",
    [
        "kept = x",
        "kept = torch.from_numpy(x)[5:]",
        "import os, signal; pid = os.fork() or signal.pause()",
    ],
    ids=["name", "view", "child"],
)  # fmt: skip
def test_memory_that_ranks_use_is_not_written_again(own_mesh: cm.Mesh, keep: str) -> None:
    mesh, name = own_mesh, own_mesh.name
    value = np.zeros(2 * N, dtype=np.int64)
    mesh.push(x=value)
    mesh[0].cell(keep)
    for number in range(1, 6):
        mesh.push(x=value + number)
    if "fork" in keep:
        mesh[0].cell("import signal; os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0); kept = [0]")
    assert mesh[0].pull("max(kept)") == 0
    assert mesh.pull("int(x[0])").list == [5, 5]
    sizes = segments_of(name)  # of `x`, of `kept`, and of an earlier `x`
    assert len(sizes) == 3
    assert min(sizes) >= value.nbytes
    mesh.restart()
    assert segments_of(name) == []


def segments_of(name: str) -> list[int]:
    """The sizes of a mesh's segments that this process has open."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if os.readlink(link) == f"/memfd:{memfd_name(name)} (deleted)":
                sizes[link.stat().st_ino] = link.stat().st_blocks * 512
    return [*sizes.values()]


Read = Callable[[], Any]


def last_of(value: Any) -> Read:
    return lambda: value[-1]


def last_in_thread(value: Any) -> Read:
    goes_on, seen = threading.Event(), []

    def wait_and_read(own: Any = value) -> None:
        goes_on.wait()
        seen.append(own[-1])

    thread = threading.Thread(target=wait_and_read)
    thread.start()

    def read() -> Any:
        goes_on.set()
        thread.join()
        return seen[0]

    return read


def last_in_child(value: Any) -> Read:
    """Of a process with a copy of this one's memory; here, nothing refers to the value any more."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        there.recv(1)
        there.send(str(float(value[-1])).encode())
        os._exit(0)

    def read() -> Any:
        with here, there:
            here.send(b"x")
            seen = here.recv(99)
        os.waitpid(pid, 0)
        return seen

    return read


def last_of_run(run: Any) -> Read:
    run.wait()
    return lambda: run.result()[1][-1]


def last_pushed_back(mesh: cm.Mesh, value: Any) -> Read:
    mesh.push(y=value)
    return lambda: mesh[0].pull("y[-1]")


# Ways to keep a value of rank 1, whose last element is read later, for the first time.
KEEPS: dict[str, Callable[[cm.Mesh], Read]] = {
    "name": lambda mesh: last_of(mesh.pull("x")[1]),
    "value of a call": lambda mesh: last_of(mesh.run(lambda: x)[1]),  # type: ignore[name-defined] # noqa: F821
    "nest": lambda mesh: last_of(mesh.pull("{'a': [x, 1]}")[1]["a"][0]),
    "gathered": lambda mesh: last_of(mesh.pull("x", gather=True)),
    "slice": lambda mesh: last_of(mesh.pull("x", gather=True)[-3:]),
    "array": lambda mesh: last_of(mesh.pull("x", gather=True).numpy()[5:]),
    "memoryview": lambda mesh: last_of(memoryview(mesh.pull("x")[1].numpy())),
    "DLPack": lambda mesh: last_of(np.from_dlpack(mesh.pull("x")[1])),
    "pickle": lambda mesh: last_of(pickle.loads(pickle.dumps(mesh.pull("x")[1]))),
    "pushed back": lambda mesh: last_pushed_back(mesh, mesh.pull("x")[1]),
    "thread": lambda mesh: last_in_thread(mesh.pull("x")[1]),
    "child": lambda mesh: last_in_child(mesh.pull("x")[1]),
    "run that is read later": lambda mesh: last_of_run(
        mesh.submit(lambda: x)  # type: ignore[name-defined] # noqa: F821
    ),
}


@pytest.mark.filterwarnings("ignore:This process")  # as it forks beside threads
@pytest.mark.parametrize("way", KEEPS)
def test_memory_that_the_notebook_uses_is_not_written_again(quick: cm.Mesh, way: str) -> None:
    mesh = quick
    mesh.cell(f"x = torch.full(({2 * N},), 3.0 + rank)")
    read = KEEPS[way](mesh)
    for number in range(5, 10):
        mesh.cell(f"x += {number}")
        mesh.pull("x")
        mesh.pull("x", gather=True)
    assert float(read()) == 4.0


def test_ranks_write_results_where_earlier_ones_were(own_mesh: cm.Mesh) -> None:
    mesh, earlier, places = own_mesh, mapped_results(), []
    mesh.cell(f"x = torch.full(({2 * N},), rank)")
    for number in range(4):
        got = mesh.pull("x", gather=True) if number % 2 else mesh.pull("x")
        places.append(mapped_results() - earlier)
        assert int(got[1][-1] if number % 2 == 0 else got[-1]) == 1 + number
        del got
        mesh.cell("x += 1")
    assert len(places[0]) == 2
    assert places == places[:1] * 4
    assert mesh.run(num_results).list == [1, 1]
    os.kill(mesh[1].run(os.getpid), signal.SIGKILL)
    mesh.heal()
    assert mesh.run(num_results).list == [0, 0]
    mesh.cell(f"x = torch.full(({2 * N},), rank)")
    kept = mesh.pull("x")
    assert len(mapped_results() - earlier - places[0]) == 2
    mesh.restart()
    assert int(kept[1][-1]) == 1
    assert mesh.run(num_results).list == [0, 0]


def num_results() -> int:
    """How many segments of results this rank has open."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    links = [link for link in links if os.path.exists(link)]  # not that of the directory
    return len({os.stat(link).st_ino for link in links if "cellmesh-result" in os.readlink(link)})


def test_next_notebook_reads_what_was_in_flight(runtime_dir: Path) -> None:
    """The agent keeps a value that no notebook has read, while ranks write others."""
    with cm.start(2, lease_s=60) as mesh:
        mesh.cell(f"x = torch.full(({2 * N},), 1.0)")
        kept = mesh.pull("x")
        mesh.detach()
        with cm.attach(mesh.name) as again:
            for _ in range(3):
                again.cell("x += 1")
                again.pull("x")
            assert [float(value[-1]) for value in kept.list] == [1.0, 1.0]


def test_value_too_large_to_copy_is_refused_before_the_copy(
    quick: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.push(x=1)
    monkeypatch.setattr(limits, "free_bytes", lambda: 4 << 20)
    part = torch.zeros(1 << 28, dtype=torch.uint8)[: 100 << 20]
    for value in (np.broadcast_to(np.zeros(1, "u1"), (1 << 40,)), part, ["x" * (100 << 20)]):
        with pytest.raises(MeshUsageError, match=r"'x'.* does not fit: 4.2 MB of memory are free"):
            quick.push(x=value)
        with pytest.raises(MeshUsageError, match=r"argument 0 of len.* does not fit"):
            quick.run(len, value)
    assert quick.pull("x").list == [1, 1]


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
