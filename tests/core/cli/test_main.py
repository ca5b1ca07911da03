"""The command line: its usage, and where the ticket of an agent is found."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

import cellmesh as cm
from cellmesh.cli.agent import TICKET_VARIABLE, read_given
from cellmesh.cli.main import main
from cellmesh.errors import HostError
from cellmesh.wire.host import Place
from cellmesh.wire.own_file import to_json
from tests.core.cli.test_rendering import put


def test_version_and_help() -> None:
    assert run("--version").output == f"cellmesh {cm.__version__}\n"
    for command in ("start", "shell", "doctor", "ps", "stop", "agent"):
        text = run(f"{command} --help").output
        assert f"Examples:\n    cellmesh {command}" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stpo", "No such command 'stpo'."),
        ("stop", "name the meshes to stop, or say --all"),
        ("doctor -n 0", "0 is not in the range 1<=x<=1024"),
    ],
)
def test_wrong_usage_is_an_error_that_says_what_is_right(line: str, message: str) -> None:
    done = run(line)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_start_without_a_lease_is_refused_before_anything_starts() -> None:
    done = run("start 2 --lease 0")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "a mesh that nothing is attached to needs a lease, like --lease 30m" in done.stderr


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tickets lie; a short path, as pytest's own may be too long for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="cm") as directory:
        monkeypatch.setattr("cellmesh.cli.meshes.runtime_root", lambda: Path(directory) / "root")
        yield Path(directory) / "root"


def run(line: str) -> Result:
    return CliRunner().invoke(main, line.split())


def states() -> dict[str, str]:
    return {mesh["name"]: mesh["state"] for mesh in json.loads(run("ps --json").stdout)}


@pytest.mark.parametrize("line", ["ps", "stop ghost"])
def test_a_process_with_the_agents_number_or_a_ticket_open_is_none_of_the_mesh(
    line: str, root: Path
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        ghost = put(root, "ghost", agent_pid=bystander.pid)
        editor = subprocess.Popen(["tail", "-f", str(ghost.path)], stdout=subprocess.DEVNULL)
        try:
            assert run(line).exit_code == 0
            assert not Path(ghost.directory).exists()
            assert bystander.poll() is editor.poll() is None
        finally:
            for process in (bystander, editor):
                process.kill()
                process.wait()


def test_a_mesh_that_is_starting_is_left_alone_by_ps(root: Path) -> None:
    ghost = put(root, "ghost", agent_pid=0, created_at=time.time())
    assert states() == {"ghost": "starting"}
    assert ghost.path.exists()
    assert run("stop ghost").exit_code == 0
    assert not Path(ghost.directory).exists()


def test_tickets_of_other_places_and_versions_remove_nothing(root: Path, tmp_path: Path) -> None:
    moved = put(root, "moved")
    moved.path.write_bytes(to_json(msgspec.structs.replace(moved, directory=str(tmp_path))))
    afar = put(root, "afar", place=Place("elsewhere", "boot", "pid:[1]"), agent_pid=1 << 22)
    old = put(root, "old", version="9.9.9", agent_pid=1)
    assert states() == {"moved": "elsewhere", "afar": "elsewhere"}
    said = run("ps")
    assert said.stdout == "no mesh is running\n"
    assert "cellmesh 9.9.9, and this is" in said.stderr
    assert run("stop --all").exit_code == 0
    assert tmp_path.exists()
    assert afar.path.exists()
    assert old.path.exists()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ticket"
    path.write_text("in a file")
    path.chmod(0o600)
    return path


def read(option: str | None, environment: dict[str, str], stdin: bytes = b"") -> bytes:
    read_end, write_end = os.pipe()
    os.write(write_end, stdin)
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as pipe:
        return read_given(option, environment, pipe)


def test_ticket_is_taken_from_where_it_is_given(file: Path) -> None:
    assert read(str(file), {}) == b"in a file"
    assert read(None, {TICKET_VARIABLE: str(file)}) == b"in a file"
    assert read(None, {TICKET_VARIABLE: ' {"in": "it"}\n'}) == b'{"in": "it"}'
    assert read("-", {}, b"a line\nan order\n") == b"a line\n"
    assert read(None, {}, b"a line\n") == b"a line\n"
    environment = {TICKET_VARIABLE: '{"secret": 1}', "HOME": "/"}
    assert read(str(file), environment) == b"in a file"
    assert environment == {"HOME": "/"}, "the environment keeps no ticket"
    file.chmod(0o640)
    with pytest.raises(HostError, match="not yours alone"):
        read(str(file), {})
    with pytest.raises(click.UsageError, match="--ticket FILE"):
        read(None, {})
