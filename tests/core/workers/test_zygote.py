"""A zygote whose system has no process left: it says so, and there is no second one of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import msgspec
import pytest
import torch

from cellmesh.errors import HostError
from cellmesh.wire import marks, waiting
from cellmesh.workers import zygote
from tests.conftest import run_python

WAIT_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore:This process")  # pytest's may have threads


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    """The zygote's end of its connection to its agent."""
    own, other = socket.socketpair()
    with own, other:
        yield own


@pytest.mark.parametrize("num_forks", [0, 1, 2])
def test_a_fork_that_fails_is_reported(
    num_forks: int, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise BlockingIOError(11, "no process left")

    monkeypatch.setattr(zygote.os, "sched_getaffinity", lambda pid: {0, 1})
    forks = iter([*[os.fork] * num_forks, fails])
    monkeypatch.setattr(zygote.os, "fork", lambda: next(forks)())
    forked = zygote._fork_orphans([lambda: None, lambda: None], agent)
    assert list(map(bool, forked.pids)) == [num_forks == 2, False]
    assert forked.problem == "[Errno 11] no process left"


@pytest.mark.parametrize(("killed", "expected"), [(None, "111111"), (0, "100111"), (1, "111100")])
def test_several_processes_fork_and_one_that_is_killed_loses_its_part_only(
    killed: int | None, expected: str, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote.os, "sched_getaffinity", lambda pid: set(range(8)))
    plain_fork, depth, num = os.fork, 0, [0, 0]  # of forks, here and in a forking process

    def fork() -> int:
        nonlocal depth
        num[depth] += 1
        if depth == 1 and num == [(killed or 0) + 1, 2] and killed is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if (pid := plain_fork()) == 0:
            depth += 1
        return pid

    monkeypatch.setattr(zygote.os, "fork", fork)
    forked = zygote._fork_orphans([lambda: None] * 6, [agent])
    assert "".join(str(int(pid > 0)) for pid in forked.pids) == expected
    assert forked.problem == ("" if killed is None else "the process that forks them was killed")
    assert len(set(forked.pids) - {0}) == expected.count("1")


def test_the_store_is_forked_first_and_each_rank_with_its_own_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(zygote, "_start_store", lambda options, own: begun.append(own))
    monkeypatch.setattr(zygote, "_start_rank", lambda raw, own, shell: begun.append((raw, own)))
    ranks = [msgspec.Raw(b"\0"), msgspec.Raw(b"\1")]
    request = zygote.Fork(zygote.StoreOptions("127.0.0.1", 1, 2), ranks)
    for start in zygote._list_starts(request, range(11), Mock()):
        start()
    assert begun == [0, (ranks[0], [1, 2, 3, 4, 5]), (ranks[1], [6, 7, 8, 9, 10])]


_END_BELOW = """
import os, signal, subprocess
from cellmesh.wire import marks
from cellmesh.workers import linux_process
linux_process.become_subreaper()
own, its = "0" * 16, "1" * 16
marks.claim(own, 0)

def fork(mark, owner=None):
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        marks.claim(mark, owner)
        below = subprocess.Popen(["sleep", "1000"])
        os.write(write_end, b"%d" % below.pid)
        signal.pause()
    return [pid, int(os.read(read_end, 20))]

guardian = fork(its)
# A rank, the zygote of a mesh that a rank has started, and one whose mark has another owner.
others = fork(own) + fork(its, 0) + fork(its, 1)
cleared = subprocess.Popen(["sleep", "1000"], env={}).pid
linux_process.end_descendants(own)
print([os.path.exists(f"/proc/{pid}") for pid in [*guardian, *others, cleared]], flush=True)
for pid in guardian:
    os.kill(pid, signal.SIGKILL)
"""


def test_only_the_guardian_of_another_mesh_and_what_is_below_it_outlives_a_mesh() -> None:
    environment = {**os.environ, marks.VARIABLE: marks.free_value()}
    command = [sys.executable, "-c", _END_BELOW]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert run.stdout == f"{[True] * 2 + [False] * 7}\n"


_PLACE = """
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from cellmesh.workers.zygote import place_descriptors
pipes = [os.pipe() for _ in range(3)]
out = os.dup(1)
given = [pipes[2][1], pipes[0][1], out, pipes[1][1]]
inodes = [os.fstat(number).st_ino for number in given]
place_descriptors(given)
left = sorted(int(number) for number in os.listdir("/proc/self/fd"))
assert [os.fstat(number).st_ino for number in range(4)] == inodes
assert [os.get_inheritable(number) for number in range(4)] == [True] * 3 + [False]
os.write(2, str(left[:-1]).encode())
"""


_LOADS_BESIDE = """
import os
import sys
from cellmesh.workers import zygote

names = (*zygote._EXTENSIONS, *zygote._BESIDE, *zygote._REQUIRED)
zygote._try_to_import(("no_such_module", *names))
print([name for name in names if name not in sys.modules], "torch" in sys.modules)
zygote._load_libraries()
with open("/proc/self/maps") as file:
    print("libtorch_cpu.so" in file.read(), "torch" in sys.modules)
"""


@pytest.mark.parametrize("is_for_gpus", [False, True])
def test_libraries_of_torch_are_loaded_before_it_unless_its_build_is_for_gpus(
    is_for_gpus: bool, tmp_path: Path
) -> None:
    package = Path(torch.__file__).parent
    if is_for_gpus:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").touch()
        shutil.copytree(package / "lib", tmp_path / "torch/lib", copy_function=os.symlink)
        (tmp_path / "torch/lib/libtorch_xpu.so").touch()
    source = f"import sys\nsys.path.insert(0, {str(tmp_path)!r}){_LOADS_BESIDE}"
    run = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    is_loaded = not is_for_gpus and torch.version.cuda is None and torch.version.hip is None
    assert run.stdout.splitlines() == ["[] False", f"{is_loaded} False"]


def test_a_file_in_the_place_of_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HostError, match=r"torch\.py is in the place of torch.* rename it"):
        zygote.import_all()


def test_descriptors_get_their_places_under_a_low_limit() -> None:
    process = run_python("-c", _PLACE, check=False)
    assert process.stdout + process.stderr == "[0, 1, 2, 3]"


_WAIT = """
import os, time
from cellmesh.workers import linux_process
linux_process.become_subreaper()
agent, (go, ready) = os.getpid(), os.pipe()
if (middle := os.fork()) == 0:
    if os.fork() == 0:
        looks = []
        def parent(getppid=os.getppid):
            looks.append(getppid())
            os.write(ready, b".")  # the intermediate process exits 0.1 s after the first look
            return looks[-1]
        linux_process.os.getppid = parent
        linux_process.die_with(agent)
        os._exit(looks[0] == agent or len(looks) > 4)
    os.read(go, 1)
    time.sleep(0.1)
    os._exit(0)
os.waitpid(middle, 0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_process_that_was_forked_twice_sleeps_until_its_agent_is_its_parent() -> None:
    assert subprocess.run([sys.executable, "-c", _WAIT], timeout=30, check=False).returncode == 0


def test_a_silent_connection_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[bytes]()

    def fork(connection: socket.socket, *_: object) -> None:
        with connection:
            served.append(connection.recv(1))

    monkeypatch.setattr(zygote, "_fork_mesh", fork)
    loading = Mock(limits=Mock(return_value=[]), descriptors=Mock(return_value=[]))
    directory = os.open(tmp_path, os.O_RDONLY)
    own, agent = socket.socketpair()
    with own, waiting.listen(directory, "zygote") as server:
        serving = threading.Thread(target=zygote._serve, args=([own, server], None, loading))
        serving.start()
        with agent:
            connections = [waiting.connect(directory, "zygote", WAIT_S) for _ in range(3)]
            for connection, data in zip(reversed(connections), (b"c", b"b", b"a"), strict=True):
                assert connection is not None
                connection.send(data)
        serving.join()
    os.close(directory)
    assert sorted(served) == [b"a", b"b", b"c"]
    for connection in connections:
        connection.close()
