"""An agent and a link whose handlers raise: what they report, and that the mesh goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.core.core import Core
from cellmesh.wire.messages import Progress
from tests.conftest import check_nothing_left

# Read by every interpreter that starts: in the agent's, handlers fail, some always and some at
# first.
SITE = """
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


def test_an_agent_whose_handlers_raise_goes_on_and_says_so(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        SITE.replace("PACKAGE_PARENT", repr(str(Path(cm.__file__).parents[1])))
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with cm.start(2) as mesh:
        mesh.cell("import os; kept = rank; os.system('echo below Python; (sleep 0.01 &)')")
        pid = mesh[1].pull("os.getpid()")
        os.kill(pid, signal.SIGKILL)
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
    check_nothing_left(runtime_dir)


@pytest.mark.parametrize("name", ["receive", "tick"])
def test_a_link_whose_handlers_raise_goes_on_and_says_so(
    name: str, own_mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    then: Any = getattr(Core, name)

    def failing(*args: Any) -> Any:
        if name == "tick" or isinstance(args[1].verb, Progress):
            monkeypatch.setattr(Core, name, then)
            raise RuntimeError(f"{name} fails")
        return then(*args)

    monkeypatch.setattr(Core, name, failing)
    own_mesh.restart()
    assert own_mesh.pull("rank").list == [0, 1]
    shown = capfd.readouterr().err
    assert "the notebook's link to the mesh met an error at" in shown
    assert f"RuntimeError: {name} fails" in shown
