"""A zygote that the mesh of a shell leaves serves meshes of later processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cellmesh.controller.session.launch import prestart
from cellmesh.controller.session.launch.prestart import ShellPrestart, shell_prestart
from cellmesh.controller.session.living import find_waiting
from cellmesh.controller.session.start import start_from
from cellmesh.errors import HostError
from cellmesh.wire.ticket import runtime_root
from cellmesh.wire.waiting import find_sockets, open_directory
from tests.conftest import check_nothing_left, own_runtime_dir, stop_process
from tests.support.tickets import make_ticket

from ..faults.watching import wait_until
from .test_prestart import command, wait_for_end

WAIT_S = 60.0


def new_client() -> ShellPrestart:
    """Stand for one more process of the shells."""
    client = shell_prestart()
    assert client is not None
    return client


def num_sockets(least_modules: int = -1) -> int:
    directory = open_directory()
    found = find_sockets(directory)
    os.close(directory)
    return sum(each.num_modules >= least_modules for each in found)


def leave() -> psutil.Process:
    """Leave a zygote, as a process does that has found none."""
    client = new_client()
    assert not client.prepare(WAIT_S)
    client.leave_one()
    (process,) = find_waiting(runtime_root())
    return process


@pytest.fixture(scope="module")
def zygote() -> Iterator[psutil.Process]:
    """The zygote that waits for this module's meshes."""
    with own_runtime_dir() as directory:
        process = leave()
        wait_until(lambda: num_sockets(least_modules=0), WAIT_S, "torch is imported")
        yield process
        check_nothing_left(directory)
        assert num_sockets() == 0


def ask(client: ShellPrestart, directory: Path) -> None:
    """Have a mesh forked that must not be."""
    ticket = make_ticket(directory=str(directory))
    with open(os.devnull, "wb") as log:
        client.start(ticket, log.fileno())


def test_a_start_waits_for_one_that_has_more_modules_to_import(zygote: psutil.Process) -> None:
    def has_all() -> bool:
        return "torch._inductor.compile_fx" in sys.modules  # of the last stage

    with start_from(client := new_client(), 1) as mesh:
        client.leave_one()
        assert mesh[0].run(has_all)
    assert find_waiting(runtime_root()) == [zygote]


def test_meshes_of_two_processes_at_once_have_all_of_their_own(
    zygote: psutil.Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def look() -> tuple[object, ...]:
        status = Path("/proc/self/status").read_text()
        is_blocked = "SigBlk:\t0000000000000000" not in status
        policy = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        kinds = [str(signal.getsignal(each)) for each in (signal.SIGHUP, signal.SIGPIPE)]
        variables = type(os.environ).__name__, os.environ["SEED"]
        return (*variables, os.getcwd(), policy, is_blocked, *kinds)

    def run(client: ShellPrestart) -> tuple[object, ...]:
        with start_from(client, 1) as mesh:
            client.leave_one()  # which the mesh makes needless
            seen: tuple[object, ...] = mesh[0].run(look)
            return seen

    monkeypatch.setattr(prestart, "_ACCEPT_S", WAIT_S)
    monkeypatch.setenv("SEED", "3")
    monkeypatch.setenv("TERM", "another")
    monkeypatch.chdir(tmp_path)
    own = (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with ThreadPoolExecutor(2) as pool:
            seen = list(pool.map(run, [new_client(), new_client()]))
    finally:
        signal.signal(signal.SIGHUP, hang_up)
    expected = ("_Environ", "3", str(tmp_path), own, False, *[str(signal.SIG_IGN)] * 2)
    assert seen == [expected] * 2
    assert find_waiting(runtime_root()) == [zygote]


def test_it_refuses_what_it_does_not_fit_by_name(
    zygote: psutil.Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    client = new_client()
    assert client.prepare(WAIT_S)
    with pytest.raises(HostError, match="TORCH_LOGS is not what it was"):
        ask(client, tmp_path)
    assert not client.prepare(WAIT_S), "it was asked already"
    monkeypatch.delenv("TORCH_LOGS")
    before = os.umask(0o077)
    try:
        client = new_client()
        assert client.prepare(WAIT_S)
        with pytest.raises(HostError, match="umask is not what it was"):
            ask(client, tmp_path)
    finally:
        os.umask(before)


def test_a_stopped_one_is_not_waited_for(
    zygote: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prestart, "_ACCEPT_S", 0.1)
    serving = [zygote, *zygote.children(recursive=True)]
    for process in serving:
        stop_process(process.pid)
    assert not new_client().prepare(WAIT_S)
    for process in serving:
        process.send_signal(signal.SIGCONT)


def test_a_mesh_and_the_next_start_survive_its_death(
    zygote: psutil.Process, tmp_path: Path
) -> None:
    client = new_client()
    with start_from(client, 1) as mesh:
        late = new_client()
        assert late.prepare(WAIT_S)
        zygote.kill()
        wait_for_end(zygote)
        with pytest.raises(HostError, match="has ended"):
            ask(late, tmp_path)
        assert mesh[0].run(os.getpid) > 0
    again = leave()  # it is listed while it imports torch, and ended
    assert num_sockets() == 1
    assert f"process {again.pid} waits for the next `cellmesh run`: " in command("ps")
    assert f"stopped process {again.pid}, which waited" in command("stop", "--all")
    wait_for_end(again)


def test_where_no_socket_can_be_there_is_none(runtime_dir: Path) -> None:
    (runtime_dir / "cellmesh-waiting").touch()
    client = new_client()
    assert not client.prepare(WAIT_S)
    client.leave_one()
    assert find_waiting(runtime_root()) == []
