from __future__ import annotations

from pathlib import Path

import pytest

from cellmesh.controller.options import Options
from cellmesh.controller.session.launch.local import make_ticket
from cellmesh.errors import HostError
from cellmesh.workers.replicas import copying


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which was removed."""
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    return directory


def test_a_start_says_that_the_directory_was_removed(removed: Path) -> None:
    with pytest.raises(HostError, match="the working directory of this process was removed"):
        make_ticket(Options(num_ranks=1, mesh={"dp": 1}))


def test_names_of_a_rank_there_can_be_copied(removed: Path) -> None:
    pickled, _ = copying.gather({"x": 1}, ["x"])
    assert pickled.stream
