"""Parts of cellmesh that raise, as with another version of a library."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.core.core import Core
from cellmesh.errors import CellmeshError
from cellmesh.workers.rank import features
from tests.conftest import run_python

# Both are read by every interpreter that starts. The modules to break are in the environment.
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
# In the agent's interpreter handlers fail, some always and some at first.
FAILING_AGENT = """
import sys
if any("cellmesh.workers" in word and "zygote" not in word for word in sys.orig_argv):
    sys.path.insert(0, PACKAGE_PARENT)
    import cellmesh.workers.agent.agent as agent, cellmesh.workers.agent.processes as processes

    def fail(owner, name, times):
        then, left = getattr(owner, name), [times]
        def failing(*args):
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError(f"{name} fails")
            return then(*args)
        setattr(owner, name, failing)

    fail(processes.Processes, "_hear_text", 1000)
    fail(processes.Processes, "_reap_rank", 1)
    fail(processes.Processes, "reap_orphans", 1)
    fail(agent.Supervisor, "tick", 3)
    fail(agent.Supervisor, "kill", 1)
    fail(agent.ControllerPort, "tick", 3)
    fail(agent.ControllerPort, "dismiss", 1)
"""
USES = {
    "inspect.handler": "mesh.inspect('rank')",
    "replicas.parts": "mesh.check('rank')",
    "checkpoint": "mesh.save('rank', path=path)",
    "trace.torch_profiler": "mesh.profile('pass')",
    "rank.debugger": "mesh.cell('breakpoint()')",
    "progress": "mesh.cell('import tqdm.notebook')",
}


def run_at_start(code: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = repr(str(Path(cm.__file__).parents[1]))
    (directory / "sitecustomize.py").write_text(code.replace("PACKAGE_PARENT", parent))
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_start_of_a_rank_imports_no_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_at_start(BREAKER, tmp_path, monkeypatch)
    workers = Path(features.__file__).parents[1]
    folders = [
        f"{folder}.{path.stem}"
        for folder in ("inspect", "replicas")
        for path in (workers / folder).glob("[a-z]*.py")
    ]
    monkeypatch.setenv("BROKEN", " ".join([*USES, "complete", *folders]))
    code = "from cellmesh.workers import zygote; from cellmesh.workers.rank import main, shell"
    run_python("-c", code)


def test_broken_features_are_named_where_they_are_used_and_cost_nothing_else(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_at_start(BREAKER, tmp_path, monkeypatch)
    monkeypatch.setenv("BROKEN", " ".join(USES))
    with cm.start(1) as mesh:
        mesh.cell("x = rank + 1")
        for module, use in USES.items():
            try:
                said = str(eval(use, {"mesh": mesh, "path": str(tmp_path / "saved")}))
            except CellmeshError as error:
                said = str(error)
            said += "".join(capsys.readouterr())
            feature = module.replace("replicas.parts", "replicas.handler")  # which imports it
            named = f"cellmesh.workers.{feature} cannot be imported (KeyError: '__getattribute__')"
            assert named in said, said
        mesh.cell("x += 1")
        assert mesh[0].pull("x") == 2
        assert mesh[0].run(lambda: 2) == 2


def test_an_agent_and_a_link_whose_handlers_raise_go_on_and_say_so(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_at_start(FAILING_AGENT, tmp_path, monkeypatch)
    tick = Core.tick

    def fail_once(core: Core, now: float) -> Any:
        monkeypatch.setattr(Core, "tick", tick)
        raise RuntimeError("the core fails")

    with cm.start(2) as mesh:
        monkeypatch.setattr(Core, "tick", fail_once)
        mesh.cell("import os; kept = rank; os.system('echo below Python; (sleep 0.01 &)')")
        os.kill(mesh[1].pull("os.getpid()"), signal.SIGKILL)
        with pytest.raises((cm.RankFailure, cm.RankDied), match="rank 1"):
            mesh[1].run(int)
        assert mesh.heal().respawned == (1,)
        mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
        assert mesh.pull("t.item()").list == [2.0, 2.0]
        assert mesh[0].pull("kept") == 0
        (log,) = runtime_dir.glob("cellmesh/*/logs/agent.log")
        shown, logged = capfd.readouterr().err, log.read_text()
    for text in (shown, logged):
        for name in ("_hear_text", "_reap_rank", "tick"):
            assert f"RuntimeError: {name} fails" in text
        assert "the mesh's agent met an error at" in text
    assert "the notebook's link to the mesh met an error at" in shown
    assert "RuntimeError: the core fails" in shown
