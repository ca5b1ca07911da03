"""What healing does by itself: which methods pass through, what is counted, NCCL's path with a
stand-in.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as _c10d
from torch._C._distributed_c10d import FakeWork, ProcessGroup, TCPStore
from torch.distributed import DistStoreError
from torch.futures import Future

from cellmesh.errors import GroupDown
from cellmesh.workers.groups import check_torch, connections, find_missing
from cellmesh.workers.groups.group_factory import GroupPlan, Transport
from cellmesh.workers.groups.healable_group import HealableGroup
from cellmesh.workers.groups.ledger import Ledger
from cellmesh.workers.groups.store import MeshStore
from cellmesh.workers.groups.waits import GlooWork
from cellmesh.workers.trace.recorder import Spans


class FakeBackend:
    def __init__(self, name: str) -> None:
        self._name = name
        self.num_aborts = 0

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.num_aborts += 1

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class FakeGroup:
    """A plain group, as far as healing looks at it; all operations have ended when they begin."""

    def __init__(self, **backends: str) -> None:
        self._backends = {device: FakeBackend(name) for device, name in backends.items()}
        self._device_types = [torch.device(device) for device in self._backends]
        self.calls: list[str] = []

    def _get_backend(self, device: torch.device) -> FakeBackend:
        return self._backends[device.type]

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return FakeWork()

        return call


@pytest.fixture
def store() -> MeshStore:
    return MeshStore("127.0.0.1", 1)  # where nobody listens


@pytest.fixture
def ledger(store: MeshStore) -> Ledger:
    return Ledger(store.waits)


@pytest.fixture
def group(ledger: Ledger) -> HealableGroup:
    made = HealableGroup(ledger, GroupPlan("7", (2, 5), "gloo", "", "ours", 1.0), 0, 2)
    made.connect(FakeGroup(cpu="gloo"), Transport())
    return made


def test_every_method_of_the_installed_process_group_passes_through() -> None:
    of_cpp = {"rank", "size", "boxed", "unbox", "BackendType"}
    names = {name for name in dir(ProcessGroup) if not name.startswith(("__", "_pybind11"))}
    assert names - of_cpp <= set(vars(HealableGroup))


def test_a_group_that_is_down_says_why_and_what_to_type(group: HealableGroup) -> None:
    group.take_down("rank 5 is missing")
    with pytest.raises(
        GroupDown, match=r"'7' of ranks 2, 5 is down: rank 5 is missing\. %dist_heal"
    ):
        group.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError):
        _ = group._device_types
    assert group.record.count().num_collectives == 0
    group.shutdown()  # destroying it is possible
    group.abort()


def test_operations_count_until_the_group_is_connected(
    group: HealableGroup, ledger: Ledger
) -> None:
    group.allreduce([torch.ones(1)])
    group.barrier()
    group.send([torch.ones(1)], 1, 0)
    for _ in range(2):
        group.recv([torch.ones(1)], 1, 0)
    count = group.record.count()
    assert (count.name, count.ranks, count.num_collectives) == ("7", (2, 5), 2)
    assert (count.num_sent, count.num_received) == (((5, 1),), ((5, 2),))
    assert ledger.touched == [group.record]
    group.connect(FakeGroup(cpu="gloo"), Transport())
    assert group.record.count().num_collectives == 0


def test_nccl_is_aborted_once_and_gloo_beside_it_is_not(group: HealableGroup) -> None:
    inner = FakeGroup(cpu="gloo", cuda="nccl")
    group.connect(inner, Transport())
    assert group.cut() == 1
    assert (inner._backends["cuda"].num_aborts, inner._backends["cpu"].num_aborts) == (1, 0)
    assert not connections.abort_nccl(FakeGroup(cpu="gloo", cuda="gloo"))


def test_nccl_watchdog_leaves_the_process_alone() -> None:
    environment = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    connections.prepare_nccl(environment, torch.device("cuda", 0))
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "1"  # the user's


Three = tuple[socket.socket, socket.socket, socket.socket]


@pytest.fixture
def connection() -> Iterator[Three]:
    """Two connected TCP sockets, and the one that listened."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        served, _ = listener.accept()
        with served:
            yield client, served, listener


def _named(*sockets: socket.socket) -> dict[int, int]:
    return {one.fileno(): os.fstat(one.fileno()).st_ino for one in sockets}


def test_listening_sockets_and_numbers_used_again_are_left_alone(connection: Three) -> None:
    client, served, listener = connection
    assert connections.connected(_named(client, served, listener)) == _named(client, served)
    assert connections.shut_down({client.fileno(): os.fstat(listener.fileno()).st_ino}) == 0
    assert connections.shut_down(_named(listener)) == 0
    assert connections.all_stand(_named(client, served))
    assert connections.shut_down(_named(client, listener)) == 1
    assert served.recv(1) == b""
    assert not connections.all_stand(_named(served))


def test_sockets_of_other_kinds_are_no_connections() -> None:
    before = connections.open_sockets()
    one, other = socket.socketpair()
    later = {**before, **_named(one, other)}
    with one.dup():
        assert connections.new_sockets(later) == {}
    with one, other, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        sockets = connections.new_sockets(before)
        assert sockets == _named(one, other, datagrams)
        assert connections.connected(sockets) == {}
        assert connections.shut_down(sockets) == 0
        one.send(b"open")
        assert other.recv(4) == b"open"


def test_a_connection_that_is_given_up_is_read_until_it_is_let_go(connection: Three) -> None:
    client, served, _ = connection
    kept = connections.KeptConnections()
    kept.keep(os.dup(served.fileno()))
    served.close()
    client.settimeout(20)
    client.sendall(bytes(32 << 20))  # more than any buffer holds: somebody reads
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""  # and closes what the other side has ended
    kept.let_go()


def test_a_wait_is_ended_from_another_thread(store: MeshStore) -> None:
    patience = store.waits
    begun, never = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        never.wait(30)

    def end() -> None:
        begun.wait(20)
        assert patience.end() == 1

    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(GroupDown, match="do not take part"):
        patience.run(wait)
    never.set()
    ender.join()
    with pytest.raises(GroupDown, match="after 0 s"):
        patience.run(lambda: threading.Event().wait(0.2), limit_s=0)
    with pytest.raises(ZeroDivisionError):
        patience.run(lambda: 1 / 0)


def test_a_wait_for_a_key_that_is_cut_is_no_error_of_the_user(
    store: MeshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "check", lambda keys: False)

    def cut() -> None:
        while not store.waits.end():
            pass

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(DistStoreError) as caught:
        store.wait(["never"], timedelta(seconds=30))
    cutter.join()
    assert connections.lost_its_peers(caught.value)


def test_a_store_that_cannot_be_reached_is_named(store: MeshStore) -> None:
    with pytest.raises(RuntimeError, match=r"store at 127\.0\.0\.1:1 cannot be reached"):
        store.wait(["key"], timedelta(seconds=1))


@pytest.mark.parametrize("num_keys", [100, 400])
def test_a_wait_for_many_keys_looks_for_one_that_is_missing(
    num_keys: int, store: MeshStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [str(number) for number in range(num_keys)]
    late, looks = keys[num_keys // 3], list[int]()
    there = set(keys) - {late}

    def check(asked: list[str]) -> bool:
        looks.append(len(asked))
        if looks[-3:] == [1, 1, 1]:
            there.add(late)
        return there >= set(asked)

    monkeypatch.setattr(store, "check", check)
    store.wait(keys, timedelta(seconds=5))
    assert looks[-1] == num_keys
    assert 1 in looks
    assert sum(looks) < 4 * num_keys


def test_ranks_that_gather_do_not_poll_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [MeshStore("127.0.0.1", server.port) for _ in range(3)]
    monkeypatch.setattr(MeshStore, "check", None)
    monkeypatch.setattr(MeshStore, "get", None)
    threads = [threading.Thread(target=store.gather, args=("all", 3)) for store in stores]
    for thread in threads[:2]:
        thread.start()
    while server.add("all", 0) < 2:
        pass
    assert not server.check(["all/all"])
    threads[2].start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def _work_of(future: Future[Any]) -> Any:
    return _c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def test_an_operation_of_which_the_future_is_held_lasts_until_it_ends(store: MeshStore) -> None:
    future: Future[Any] = Future()
    work = GlooWork(_work_of(future), store.waits, Spans(), -1)
    find, held = weakref.ref(work), work.get_future()
    del work
    assert find() is not None
    future.set_result([])
    assert held.done()
    assert find() is None


def test_the_installed_torch_has_all() -> None:
    check_torch()


@pytest.mark.parametrize(
    ("module", "part", "named"),
    [
        ("torch.distributed.gone", "thing", "torch.distributed.gone.thing"),
        ("torch._C", "_gone", "torch._C._gone"),
        ("torch._C", "Future.gone", "torch._C.Future.gone"),
        ("torch.distributed.distributed_c10d", "_new_process_group_helper(backend,rnks)",
         "torch.distributed.distributed_c10d._new_process_group_helper(rnks)"),
    ],
)  # fmt: skip
def test_missing_internals_of_a_torch_are_named(module: str, part: str, named: str) -> None:
    assert list(find_missing({module: part})) == [named]
    with pytest.raises(
        ImportError, match=r"torch \S+ has no torch.*: cellmesh is tried with torch 2\.11"
    ):
        check_torch({module: part})
