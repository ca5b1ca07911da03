"""Modules that ranks reload by themselves: objects go on with the new code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cellmesh as cm

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
