"""Large values between hosts: once over each link, and nothing waits behind them for long."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RanksInterrupted
from tests.conftest import own_runtime_dir
from tests.faults.watching import Stuck, wait_until

from .netns import Host

FORKS_AGENTS = True
WAIT_S = 60.0
MB = 1 << 20
# An interrupt or a status may take as long as on one host, and the tenths of a second that are
# under way; this machine may be busy.
SOON_S = 2.0


@pytest.fixture(scope="module")
def mesh(machines: list[Host]) -> Iterator[cm.Mesh]:
    """A mesh on two hosts, with sockets that take less than is under way, which hides no cut."""
    limits = Path("/proc/sys/net/ipv4/tcp_wmem")
    before = limits.read_text()
    limits.write_text("4096 16384 65536")
    with own_runtime_dir(), cm.start(hosts="cm1:2,cm2:2", lease_s=60) as mesh:
        yield mesh
    limits.write_text(before)


@pytest.fixture(autouse=True)
def _nothing_is_left(mesh: cm.Mesh, machines: list[Host]) -> Iterator[None]:
    """As of `conftest`, for a mesh that goes on: no value that is not in use."""
    yield
    for host in machines:
        host.mend()
    mesh.cell("globals().pop('x', None); globals().pop('y', None); None")
    with contextlib.suppress(Stuck):
        wait_until(lambda: not _segments(machines), WAIT_S, "all values are gone")
    assert not _segments(machines)


def _segments(machines: list[Host]) -> list[str]:
    """Those that are open to be read; their writers keep some to write them again."""
    found = []
    for host in machines[:2]:
        for process in host.meshes():
            with contextlib.suppress(OSError):  # it has ended since
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):  # it has been closed since
                        info = Path(f"/proc/{process.pid}/fdinfo/{link.name}").read_text()
                        is_read = not int(info.split()[3], 8) & os.O_RDWR  # of its flags
                        if is_read and "memfd:cellmesh-" in (target := str(link.readlink())):
                            found.append(f"{process.name()}: {target}")
    return found


class Pushing(threading.Thread):
    """Pushes `x` in the background.

    Attributes:
        error: what ended it.
    """

    def __init__(self, ranks: Any, **names: Any) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._ranks, self._names = ranks, names
        self.start()

    def run(self) -> None:
        try:
            self._ranks.push(**self._names)
        except BaseException as error:
            self.error = error


def received(hosts: list[Host]) -> list[int]:
    return [host.num_bytes()[0] for host in hosts]


def await_begin(hosts: list[Host], num_bytes: int) -> None:
    before = received(hosts)
    wait_until(
        lambda: all(
            now - then > num_bytes for now, then in zip(received(hosts), before, strict=True)
        ),
        WAIT_S,
        "the push is under way",
    )


def test_value_crosses_each_link_once_and_ranks_share_it(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    value = np.random.default_rng(0).random(8 * MB // 8)
    before = received(machines[:2])
    mesh.push(x=value)
    for now, then in zip(received(machines[:2]), before, strict=True):
        assert now - then < 1.2 * value.nbytes
    assert mesh.pull("float(x.sum())").list == [float(value.sum())] * 4
    mesh[0].cell("x[0] = -1")  # its own
    assert mesh.pull("float(x[0])").list == [-1.0] + [float(value[0])] * 3


def test_values_arrive_where_earlier_ones_were_and_overwrite_none(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    kept = []
    for number in range(6):
        mesh.push(x=np.full(MB, float(number)))
        if number == 1:
            mesh[1, 2].cell("y = x[5:]")
            kept = mesh.pull("x").list
    assert mesh.pull("float(x[-1])").list == [5.0] * 4
    assert mesh[1, 2].pull("float(y[-1])").list == [1.0] * 2
    assert [float(value[-1]) for value in kept] == [1.0] * 4
    for host in machines[:2]:
        agent = next(process for process in host.meshes() if process.name() == "cellmesh-agent")
        links = [os.stat(link.path) for link in os.scandir(f"/proc/{agent.pid}/fd")]
        assert len({link.st_ino for link in links if link.st_size == 8 * MB}) == 3


@pytest.mark.parametrize("back", [False, True])
def test_interrupt_is_not_behind_a_value(back: bool, mesh: cm.Mesh, machines: list[Host]) -> None:
    """1 GB over 100 Mbit/s would take 80 s."""
    if back:
        mesh.cell("import numpy; y = numpy.ones(1 << 27)")
        for host in machines[:2]:
            host.slow("100mbit")
        run = mesh.submit(lambda: y)  # type: ignore[name-defined] # noqa: F821
        sent = [host.num_bytes()[1] for host in machines[:2]]
        wait_until(
            lambda: all(
                host.num_bytes()[1] - then > 2 * MB
                for host, then in zip(machines, sent, strict=False)
            ),
            WAIT_S,
            "results are under way",
        )
        # An error that interrupts a rank while it writes its result is kept, with its frames.
        wait_until(lambda: all(s.run < 0 for s in mesh.states().values()), WAIT_S, "all have ended")
    else:
        for host in machines[:2]:
            host.slow_down("100mbit")
        run = mesh.submit(lambda x: None, np.ones(1 << 27))
        await_begin(machines[:2], 2 * MB)
    began = time.monotonic()
    mesh.report()
    assert time.monotonic() - began < SOON_S
    began = time.monotonic()
    run.interrupt()
    run.wait(WAIT_S)
    assert time.monotonic() - began < SOON_S
    with pytest.raises((RanksInterrupted, MeshUsageError)):
        print(run.result())
    assert mesh.run(abs, -1).list == [1] * 4


@pytest.mark.timeout(180)
def test_cut_in_the_middle_of_a_push_loses_nothing(mesh: cm.Mesh, machines: list[Host]) -> None:
    value = np.random.default_rng(0).random(4 * MB)
    machines[1].slow_down("100mbit")
    pushing = Pushing(mesh, x=value)
    await_begin([machines[1]], 16 * MB)
    machines[1].cut()
    session = mesh.rank_set.session
    assert session._hosts is not None
    connection = session._hosts._all[1]
    wait_until(lambda: connection.lost_at is not None, WAIT_S, "the connection is lost")
    machines[1].mend()
    pushing.join(WAIT_S)
    assert pushing.error is None
    assert not session.dead_ranks
    assert mesh.pull("float(x.sum())").list == [float(value.sum())] * 4


@pytest.mark.timeout(180)
def test_cut_in_the_middle_of_results_loses_nothing(mesh: cm.Mesh, machines: list[Host]) -> None:
    machines[1].slow("100mbit")
    mesh.cell("y = torch.arange(4 << 20) + rank")
    before = machines[1].num_bytes()[1]
    run = mesh.submit(lambda: y)  # type: ignore[name-defined] # noqa: F821
    wait_until(lambda: machines[1].num_bytes()[1] - before > 2 * MB, WAIT_S, "it is under way")
    machines[1].cut()
    session = mesh.rank_set.session
    assert session._hosts is not None
    connection = session._hosts._all[1]
    wait_until(lambda: connection.lost_at is not None, WAIT_S, "the connection is lost")
    machines[1].mend()
    results = run.result(WAIT_S)
    for rank in range(4):
        assert torch.equal(results[rank], torch.arange(4 << 20) + rank)


def test_notebook_that_leaves_in_the_middle_of_a_push_stops_no_rank(
    machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    with own_runtime_dir():
        mesh = cm.start(hosts="cm1:1,cm2:1", lease_s=60)
        mesh.cell("kept = rank")
        machines[1].slow_down("100mbit")
        pushing = Pushing(mesh, x=np.ones(8 * MB))
        await_begin([machines[1]], MB)
        mesh.detach()
        pushing.join(WAIT_S)
        assert pushing.error is not None
        machines[1].mend()
        with cm.attach(mesh.name) as again:
            assert again[1].pull("('x' in globals(), kept)") == (False, 1)
        text = "".join(capfd.readouterr())
        assert "HostError: the notebook left before the value had arrived" in text


def test_rank_that_dies_while_its_value_comes_leaves_nothing(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    pids = mesh.run(lambda: __import__("os").getpid()).list
    machines[1].slow_down("100mbit")
    pushing = Pushing(mesh[2:], x=np.ones(8 * MB))
    await_begin([machines[1]], MB)
    machines[1].inside("kill", "-9", str(pids[3]))
    wait_until(lambda: mesh.rank_set.session.dead_ranks == {3}, WAIT_S, "rank 3 is dead")
    machines[1].mend()
    pushing.join(WAIT_S)
    assert "3" in str(pushing.error)
    mesh.heal()
    assert mesh.pull("'x' in globals()").list == [False, False, True, False]


def test_weights_are_copied_from_host_to_host(mesh: cm.Mesh, machines: list[Host]) -> None:
    mesh.cell(
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "import torch\n"
        "x = distribute_tensor(torch.arange(3e6).view(3, -1), mesh, [Shard(1)])\n"
        "y = torch.zeros(3, 1_000_000)"
    )
    assert mesh.copy("x", to=mesh[2:], into="y").result() == {2: 1, 3: 1}
    assert mesh.pull("float(y.double().sum())").list == [0.0, 0.0, *[3e6 * (3e6 - 1) / 2] * 2]
    pids = mesh.run(lambda: __import__("os").getpid()).list
    mesh.cell("y.zero_(); z = torch.ones(4 << 20); w = torch.zeros(4 << 20)")
    machines[1].slow_down("100mbit")
    copying = mesh[0].copy("z", to=mesh[2:], into="w")
    await_begin([machines[1]], MB)
    machines[1].inside("kill", "-9", str(pids[3]))
    with pytest.raises((cm.RankFailure, cm.RankDied), match="rank 3"):
        copying.result(WAIT_S)
    machines[1].mend()
    assert mesh[2].pull("w.any().item()") is False
    mesh.heal()
    mesh.cell("x = y = z = w = None")
