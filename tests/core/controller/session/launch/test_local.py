"""The launcher of an agent on this machine, and the zygote that waits for the next mesh."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellmesh.controller.options import Options
from cellmesh.controller.session.launch.local import (
    Launcher,
    LocalAgent,
    Process,
    describe_full_disk,
    make_ticket,
)
from cellmesh.controller.session.launch.prestart import MeshZygote, conditions
from cellmesh.controller.session.start import read_options
from cellmesh.errors import HostError
from cellmesh.wire import waiting
from cellmesh.wire.host import started_ticks
from cellmesh.wire.marks import argument, kernel_of
from cellmesh.wire.ticket import remove_directory
from cellmesh.workers.replicas import copying

from .....support import tickets

TICKET = tickets.make_ticket()


@contextlib.contextmanager
def agent_of(child: subprocess.Popen[bytes]) -> Iterator[Launcher]:
    """A launcher whose agent is a child of this process."""
    agent = Process(child.pid, started_ticks(child.pid))
    launcher = LocalAgent(TICKET, agent)
    end = launcher.start()
    try:
        yield launcher
    finally:
        os.close(end)
        child.kill()
        child.wait()


def test_an_agent_is_waited_for_signalled_and_described() -> None:
    with subprocess.Popen(["sleep", "100"]) as child, agent_of(child) as launcher:
        assert launcher.describe() == f"process {child.pid} on this machine"
        assert not launcher.wait(0)
        launcher.signal(signal.SIGKILL)
        assert launcher.wait(None)
        assert child.wait() == -signal.SIGKILL
        launcher.signal(signal.SIGKILL)  # there is none any more


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_process_with_the_number_of_an_agent_that_has_ended_is_left_alone(ticks: int) -> None:
    launcher = LocalAgent(TICKET, Process(os.getpid(), ticks))
    with pytest.raises(HostError, match="the agent has ended"):
        launcher.start()
    assert launcher.wait(None)
    launcher.signal(signal.SIGKILL)


@pytest.mark.parametrize(("num_pages", "is_full"), [(0, True), (1, True), (1 << 20, False)])
def test_a_start_that_leaves_no_log_says_that_the_disk_is_full(
    num_pages: int, is_full: bool, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = make_ticket(Options(num_ranks=1, mesh={"dp": 1}))
    remove_directory(Path(ticket.directory))  # as its guardian does
    disk = SimpleNamespace(f_bavail=num_pages, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", {runtime_dir / "cellmesh": disk}.__getitem__)
    text = describe_full_disk(ticket)
    assert is_full == (f"{4 * num_pages} kB are left: free some space" in text)
    assert is_full == bool(text)


def test_a_start_says_that_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    with pytest.raises(HostError, match="the working directory of this process was removed"):
        make_ticket(Options(num_ranks=1, mesh={"dp": 1}))
    with pytest.raises(HostError, match="the working directory of this process was removed"):
        read_options({"num_ranks": 1})
    pickled, _ = copying.gather({"x": 1}, ["x"])  # a rank there can copy names
    assert pickled.stream


# ---- the zygote that waits for a notebook's next mesh


def test_another_torch_matters_and_another_directory_on_the_path_does_not(tmp_path: Path) -> None:
    before = conditions({}, sys.path)
    assert conditions({}, ["", str(tmp_path), *sys.path]) == before
    torch = tmp_path / "torch" / "__init__.py"
    torch.parent.mkdir()
    torch.touch()
    other = conditions({}, [str(tmp_path), *sys.path])
    assert other != before
    os.utime(torch, (1, 1))  # as when it is installed again
    assert conditions({}, [str(tmp_path), *sys.path]) not in (before, other)


def test_a_mesh_is_forked_from_the_zygote_of_another_where_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    zygote = MeshZygote(tickets.make_ticket(directory=str(tmp_path), learned_list="list"))
    monkeypatch.setattr(waiting, "connect", lambda directory, name, limit_s: os.dup(directory))
    assert zygote.prepare(1.0)
    os.close(cast(Any, zygote)._socket)
    zygote._socket = None
    assert not zygote.prepare(1.0, is_preloaded=False)
    with monkeypatch.context() as patch:
        patch.setenv("READ_BY_AN_IMPORT", "1")
        assert not zygote.prepare(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as in a child that a script has forked
        assert not zygote.prepare(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "connect", lambda *_: None)
        assert not zygote.prepare(1.0)
    assert not zygote.prepare(1.0)  # a zygote that hangs is not waited for again


def test_installing_a_package_again_matters_and_a_first_bytecode_cache_does_not(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "site-packages"
    metadata = packages / "thing-1.0.dist-info"
    metadata.mkdir(parents=True)
    path = [*sys.path, str(packages)]
    before = conditions({}, path)
    (packages / "__pycache__").mkdir()  # by the first import of a module there
    assert conditions({}, path) == before
    os.utime(metadata, (1, 1))  # the same version again
    again = conditions({}, path)
    assert again != before
    (packages / "other.pth").touch()
    assert conditions({}, path) not in (before, again)


def test_a_learned_package_that_is_found_elsewhere_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, learned = ["", *sys.path], ("msgspec.json", "no_such_one")
    before = conditions({}, path, learned)
    assert before == conditions({}, path, learned) != conditions({}, path, None)
    (tmp_path / "msgspec.py").touch()  # beside the notebook
    assert conditions({}, path, learned) != before


def test_a_waiting_zygote_is_known_by_its_argument_under_one_root() -> None:
    root = Path("/run/user/me/cellmesh")
    words = ["python", "-c", "...", argument(root, 4711), "/proc/self/fd/0"]
    assert kernel_of(root, words) == 4711
    assert kernel_of(root, [argument(root, 0)]) == 0, "that of shells"
    assert kernel_of(Path("/run/user/me"), words) is None
    assert kernel_of(root, ["vi", f"{root}/zygote-of-x", f"{root}/mesh-1/ticket.json"]) is None
