"""Modules that ranks reload by themselves: objects go on with the new code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError

TEXT = """
import torch
SCALE = {n}
class Model(torch.nn.Module):
    def forward(self, x): return x * {n}
def function(x): return x + {n}
"""
Write = Callable[[int], None]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes the module `edited`, beside which ranks start."""

    def write(n: int, text: str = TEXT) -> None:
        path = tmp_path / "edited.py"
        path.write_text(text.format(n=n))
        os.utime(path, (1e9 + n, 1e9 + n))

    write(1)
    sys.path.insert(0, str(tmp_path))
    yield write
    sys.path.remove(str(tmp_path))


@pytest.fixture
def own_mesh(write: Write, runtime_dir: Path) -> Iterator[cm.Mesh]:
    with cm.start(2) as mesh:
        mesh.cell("import edited\nfrom edited import function\nmodel = edited.Model()")
        yield mesh


STATE = "float(model(torch.ones(()))), function(0), edited.SCALE"


def test_objects_go_on_with_the_new_code(own_mesh: cm.Mesh, write: Write) -> None:
    assert own_mesh.reload() == ()
    for n in (2, 3, 1):  # an older text may come back
        write(n)
        assert own_mesh.pull("edited.SCALE").list != [n] * 2
        assert own_mesh.reload() == ("edited",)
        assert own_mesh.pull(STATE).list == [(n, n, n)] * 2


def test_module_that_does_not_load_is_named_and_stays(own_mesh: cm.Mesh, write: Write) -> None:
    write(2, "SCALE = = {n}")
    for _ in range(2):
        with pytest.raises(cm.RankFailure, match=r"SyntaxError: .*edited\.py"):
            own_mesh.reload()
    assert own_mesh.pull(STATE).list == [(1, 1, 1)] * 2
    write(3)
    assert own_mesh.reload() == ("edited",)
    assert own_mesh.pull(STATE).list == [(3, 3, 3)] * 2


def test_modules_are_reloaded_before_each_cell_also_on_new_ranks(
    own_mesh: cm.Mesh, write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    own_mesh.reloads = True
    write(2)
    own_mesh.cell(f"state = {STATE}")
    assert own_mesh.pull("state").list == [(2, 2, 2)] * 2
    write(3, "raise KeyError({n})")
    own_mesh.cell(f"state = {STATE}")
    own_mesh.cell("1")
    assert own_mesh.pull("state").list == [(2, 2, 2)] * 2
    said = capfd.readouterr().err
    assert said.count("edited could not be reloaded, and is as it was: KeyError: 3") == 1
    write(4)
    with pytest.raises(cm.RankFailure):
        own_mesh[1].cell("__import__('os')._exit(1)")
    assert own_mesh.heal().empty == (1,)
    own_mesh.cell("import edited\nmodel = edited.Model()\nfrom edited import function")
    write(5)
    own_mesh.cell(f"state = {STATE}")
    assert own_mesh.pull("state").list == [(5, 5, 5)] * 2
    own_mesh.reloads = False
    write(6)
    own_mesh.cell(f"state = {STATE}")
    assert own_mesh.pull("state").list == [(5, 5, 5)] * 2
    with pytest.raises(MeshUsageError, match="reloads must be true or false"):
        own_mesh.reloads = "on"  # type: ignore[assignment]
