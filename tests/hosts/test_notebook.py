"""The notebook of two hosts, on hosts by ssh; `tests/notebooks` runs it with one machine as all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.kernels import NOTEBOOKS, execute, runtime_directory_of_a_test

from .netns import Host


@pytest.fixture
def notebook_directory() -> Iterator[Path]:
    """A runtime directory of the notebook's host, of which nothing may be left."""
    with runtime_directory_of_a_test() as directory:
        yield directory


def test_two_hosts_notebook_runs_by_ssh(
    machines: list[Host], notebook_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELLMESH_HOSTS", "cm1:2,cm2:2,cm3:2")
    (path,) = (path for path in NOTEBOOKS if path.stem == "16_two_hosts")
    notebook = nbformat.read(path, as_version=4)
    execute(notebook)
    outputs = "\n".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert "ranks 2-3 were on cm2, which is lost" in outputs
    assert "cm3" in outputs
