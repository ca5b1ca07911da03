"""The same code and environment on hosts that share no files with the notebook's."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.code_files import sync
from cellmesh.errors import HostError
from tests.faults.watching import wait_until

from .netns import Host

HOSTS = "cm1:2,cm2:1"
WAIT_S = 60.0


class Project:
    """A directory on the notebook's `sys.path` that no other host has."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_edits = 0

    def write(self, name: str, text: str) -> None:
        """Write a file, a second later each time, as Python tells versions apart by seconds."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.num_edits += 1
        os.utime(path, (1e9 + self.num_edits, 1e9 + self.num_edits))

    def load(self, name: str) -> Any:
        """Import or reload a module in the notebook."""
        module = importlib.import_module(name)
        return importlib.reload(module)


@pytest.fixture
def project(
    machines: list[Host], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Project]:
    directory = machines[0].project / request.node.name.partition("[")[0]
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    before = set(sys.modules)
    yield Project(directory)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(directory)):
            del sys.modules[name]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files in the archives that are sent to hosts."""
    sizes: list[int] = []
    plain = sync._archive

    def archive(files: Any) -> Any:
        sizes.extend(len(copy.content) for copy in files.values())
        return plain(files)

    monkeypatch.setattr(sync, "_archive", archive)
    return sizes


def test_modules_beside_the_notebook_are_the_same_on_all_hosts(
    project: Project, sent: list[int], runtime_dir: Path
) -> None:
    project.write("first.py", "def number(): return 1\n")
    project.write("package/__init__.py", "from .inner import text\n")
    project.write("package/inner.py", "text = open(__file__[:-8] + 'data.txt').read()\n")
    project.write("package/data.txt", "data")
    first = project.load("first")
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(cm.start(hosts=HOSTS, preload="first", lease_s=60))
        mesh.cell("import package, first, socket, os")
        assert mesh.pull("package.text, first.number()").list == [("data", 1)] * 3
        assert mesh.pull("socket.gethostname()").list == ["cm1", "cm1", "cm2"]
        assert mesh.run(first.number).list == [1] * 3
        assert len(sent) == 4
        sent.clear()
        mesh.cell("pass")
        assert sent == []
        # A function of a module that was edited and reloaded here.
        project.write("first.py", "def number(): return 22\n")
        mesh.cell("assert first.number() == 1")
        assert sent == [len("def number(): return 22\n")]
        first = project.load("first")
        assert mesh.run(first.number).list == [22] * 3
        # A module that ranks have imported, with objects of it.
        project.write("package/inner.py", "class Kept:\n    def value(self): return 1\ntext = ''\n")
        assert mesh.reload() == ("package.inner",)
        mesh.cell("kept = package.inner.Kept()")
        project.write("package/inner.py", "class Kept:\n    def value(self): return 2\ntext = ''\n")
        assert mesh.reload() == ("package.inner",)
        mesh.cell("value = kept.value()")
        assert mesh.pull("value").list == [2] * 3
        # Another controller goes on where this one was.
        mesh.detach()
        sent.clear()
        mesh = stack.enter_context(cm.attach(mesh.name))
        mesh.cell("pass")
        assert sent == []
        # What is removed here is removed there.
        (project.directory / "package/data.txt").unlink()
        mesh.cell("there = os.path.exists(package.__path__[0] + '/data.txt')")
        assert mesh.pull("there").list == [False] * 3


def test_own_copies_of_hosts_are_left_alone(
    project: Project, machines: list[Host], runtime_dir: Path
) -> None:
    project.write("old.py", "VALUE = 'new'\n")
    for host in machines[:2]:
        host.shell(
            f"mkdir -p {project.directory}; cd {project.directory}; touch only_here.py;"
            "echo \"VALUE = 'old'\" > old.py"
        )
    with cm.start(hosts=HOSTS) as mesh:
        mesh.cell("import old")
        assert mesh.pull("old.VALUE").list == ["new"] * 3
        with pytest.raises(cm.RankFailure, match="No module named 'only_here'"):
            mesh.cell("import only_here")
    for host in machines[:2]:
        assert host.shell(f"cat {project.directory}/old.py").strip() == "VALUE = 'old'"


def test_without_sync_hosts_have_their_own_and_what_env_names(
    project: Project,
    sent: list[int],
    machines: list[Host],
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CM_PASSED_ON", "a word")
    monkeypatch.setenv("CM_NOT_PASSED_ON", "another")
    project.write("here.py", "")
    project.write("everywhere.py", "VALUE = 'the notebook'\n")
    for host in machines[:2]:
        host.shell(
            f"mkdir -p {project.directory}; cd {project.directory};"
            f"echo \"VALUE = '{host.name}'\" > everywhere.py"
        )
    with cm.start(hosts=HOSTS, sync="off", env="CM_PASSED_ON", gpus="none") as mesh:
        names = ("CM_PASSED_ON", "CM_NOT_PASSED_ON", "CUDA_VISIBLE_DEVICES")
        found = mesh.run(lambda: [os.environ.get(name) for name in names]).list
        assert found == [["a word", None, ""]] * 3
        with pytest.raises(cm.RankFailure, match="No module named 'here'"):
            mesh.cell("import here")
        mesh.cell("import everywhere")
        assert mesh.pull("everywhere.VALUE").list == ["cm1", "cm1", "cm2"]
    assert sent == []


def test_full_disk_of_a_host_is_named_and_nothing_runs(
    project: Project, machines: list[Host], runtime_dir: Path
) -> None:
    project.write("small.py", "VALUE = 1\n")
    small = machines[1].directory / "run"
    machines[1].shell(f"mount -t tmpfs -o size=2m,mode=700 tmpfs {small}")
    try:
        with cm.start(hosts=HOSTS) as mesh:
            mesh.cell("import small; ran = 1")
            project.write("small.py", "VALUE = 22\n")
            project.write("large.py", "#" * 3_000_000)
            with pytest.raises(HostError, match=r"(?s)cm2: cannot write .* No space left"):
                mesh.cell("ran = 2")
            assert mesh.pull("ran").list == [1] * 3
            (project.directory / "large.py").unlink()
            mesh.cell("import importlib; importlib.reload(small)")
            assert mesh.pull("small.VALUE").list == [22] * 3
    finally:
        machines[1].shell(f"umount -l {small}")


def test_host_that_is_started_again_gets_what_was_changed_since(
    project: Project, machines: list[Host], runtime_dir: Path
) -> None:
    project.write("changing.py", "VALUE = 1\n")
    with cm.start(hosts=HOSTS, preload="changing", lease_s=60) as mesh:
        machines[1].kill()
        wait_until(lambda: mesh.rank_set.session.dead_ranks == {2}, WAIT_S, "cm2 is lost")
        project.write("changing.py", "VALUE = 22\n")
        assert mesh.heal().respawned == (2,)
        mesh.cell("import changing")
        assert mesh.pull("changing.VALUE").list == [1, 1, 22]


def test_a_script_runs_on_hosts_that_lack_it_or_have_another_version(
    project: Project, machines: list[Host], runtime_dir: Path
) -> None:
    """It and its modules come from the notebook's host; its end is that of the rank that failed."""
    project.write("helper.py", "number = 7\n")
    project.write(
        "train.py",
        "import os, socket, sys, helper, torch.distributed as dist\n"
        "names = 'RANK', 'LOCAL_RANK', 'GROUP_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR'\n"
        "print(socket.gethostname(), helper.number, *map(os.environ.get, names), *sys.argv)\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 2:\n"
        "    raise ValueError('no more')\n"
        "dist.barrier()\n",
    )
    there = project.directory
    machines[1].shell(f"mkdir -p {there}; cd {there}; echo number=0 | tee helper.py > train.py")
    command = [sys.executable, "-m", "cellmesh", "run", "--hosts", HOSTS, "train.py", "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    address = machines[0].address
    assert sorted(done.stdout.splitlines()) == [
        f"cm1 7 0 0 0 2 {address} train.py --lr 1",
        f"cm1 7 1 1 0 2 {address} train.py --lr 1",
        f"cm2 7 2 0 1 1 {address} train.py --lr 1",
    ]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cellmesh run: rank 2 raised ValueError: no more (train.py:6); ranks 0")
    assert last.endswith("released")
    assert done.returncode == 1
