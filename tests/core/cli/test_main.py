"""The command line: its usage, and where the ticket of an agent is found."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cellmesh as cm
from cellmesh.cli.main import TICKET_VARIABLE, main, read_given
from cellmesh.errors import HostError
from tests.core.cli.test_meshes import put


def test_version_and_help() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"cellmesh {cm.__version__}\n"
    for command in ("doctor", "ps", "stop", "agent"):
        text = CliRunner().invoke(main, [command, "--help"]).output
        assert f"Examples:\n    cellmesh {command}" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stpo", "there is no command 'stpo' (agent, doctor, ps, stop); did you mean 'stop'?"),
        ("stop", "name the meshes to stop, or say --all"),
        ("stop x --all", "name the meshes to stop, or say --all"),
        ("doctor -n 0", "0 is not in the range 1<=x<=1024"),
        ("ps --jsn", "--json"),
    ],
)
def test_wrong_usage_is_an_error_that_says_what_is_right(line: str, message: str) -> None:
    done = CliRunner().invoke(main, line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_colours_are_left_out_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmesh.cli.main.runtime_root", lambda: tmp_path / "root")
    put(tmp_path / "root", "train", agent_pid=0, created_at=time.time())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1mNAME" in CliRunner().invoke(main, ["ps"], color=True).output
    plain = CliRunner(env={"NO_COLOR": "1"}).invoke(main, ["ps"], color=True).output
    assert "NAME" in plain
    assert "\x1b[" not in plain


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ticket"
    path.write_text("in a file")
    path.chmod(0o600)
    return path


def read(option: str | None, environment: dict[str, str], stdin: bytes = b"") -> tuple[bytes, bool]:
    read_end, write_end = os.pipe()
    os.write(write_end, stdin)
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as pipe:
        return read_given(option, environment, pipe)


def test_ticket_is_taken_from_where_it_is_given(file: Path) -> None:
    assert read(str(file), {}) == (b"in a file", False)
    assert read(None, {TICKET_VARIABLE: str(file)}) == (b"in a file", False)
    assert read(None, {TICKET_VARIABLE: ' {"in": "it"}\n'}) == (b'{"in": "it"}', False)
    assert read("-", {}, b"a line\nan order\n") == (b"a line\n", True)
    assert read(None, {}, b"a line\n") == (b"a line\n", True)


def test_environment_keeps_no_ticket(file: Path) -> None:
    environment = {TICKET_VARIABLE: '{"secret": 1}', "HOME": "/"}
    assert read(str(file), environment)[0] == b"in a file"
    assert environment == {"HOME": "/"}


def test_file_that_others_can_read_is_refused(file: Path) -> None:
    file.chmod(0o640)
    with pytest.raises(HostError, match="not yours alone"):
        read(str(file), {})


def test_missing_ticket_says_where_it_may_be() -> None:
    with pytest.raises(click.UsageError, match="--ticket FILE"):
        read(None, {})
