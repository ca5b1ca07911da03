"""What the tests of calls between ranks have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellmesh.wire.ticket import write_ticket

from ....support.tickets import make_ticket

KEY = "ab" * 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a mesh."""
    tmp_path.chmod(0o700)
    write_ticket(make_ticket(name="left", key=KEY, directory=str(tmp_path), num_ranks=4))
    return tmp_path
