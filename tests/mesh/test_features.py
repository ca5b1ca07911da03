"""A feature that is broken, as by another version of a library, costs what uses it, and nothing
else.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError
from cellmesh.workers.rank import features
from tests.conftest import check_nothing_left

WORKERS = Path(features.__file__).parents[1]
FOLDERS = ("inspect", "replicas")
MODULES = (
    "checkpoint",
    "complete",
    "progress",
    "rank.debugger",
    "trace.torch_profiler",
    *(
        f"{folder}.{path.stem}"
        for folder in FOLDERS
        for path in sorted((WORKERS / folder).glob("[a-z]*.py"))
    ),
)
# Run by every Python that finds it on its path; the modules to break are in the environment.
BREAKER = """
import importlib.machinery, os, sys
class Breaker:
    def find_spec(self, name, path, target=None):
        if name.removeprefix("cellmesh.workers.") in os.environ["BROKEN"].split():
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec("raise KeyError('__getattribute__')", vars(module))
sys.meta_path.insert(0, Breaker())
"""


@pytest.fixture
def breaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "sitecustomize.py").write_text(BREAKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return monkeypatch


def test_start_of_a_rank_imports_no_feature(breaker: pytest.MonkeyPatch) -> None:
    breaker.setenv("BROKEN", " ".join(MODULES))
    code = "from cellmesh.workers import zygote; from cellmesh.workers.rank import main, shell"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


USES = {
    "inspect.static_eval": "mesh.inspect('rank')",
    "inspect.handler": "mesh.inspect('rank')",
    "inspect.summary": "mesh.inspect('rank')",
    "replicas.parts": "mesh.check('rank')",
    "checkpoint": "mesh.save('rank', path=path)",
    "trace.torch_profiler": "mesh.profile('pass')",
    "rank.debugger": "mesh.cell('breakpoint()')",
    "progress": "mesh.cell('import tqdm.notebook')",
}


@pytest.mark.parametrize("module", USES)
def test_a_broken_feature_is_named_where_it_is_used(
    module: str,
    breaker: pytest.MonkeyPatch,
    runtime_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breaker.setenv("BROKEN", module)
    with cm.start(1) as mesh:
        mesh.cell("x = rank + 1")
        assert mesh[0].run(lambda: 2) == 2
        try:
            said = str(eval(USES[module], {"mesh": mesh, "path": str(tmp_path / "saved")}))
        except CellmeshError as error:
            said = str(error)
        said += "".join(capsys.readouterr())
        assert (
            f"cellmesh.workers.{module} cannot be imported (KeyError: '__getattribute__')" in said
        ), said
        mesh.cell("x += 1")
        assert mesh[0].pull("x") == 2
    check_nothing_left(runtime_dir)
