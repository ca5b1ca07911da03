"""Where the ticket of an agent is found."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from cellmesh.cli.main import TICKET_VARIABLE, read_given
from cellmesh.errors import HostError


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
