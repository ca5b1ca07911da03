"""The process that holds an engine's nodes: what it says, and when it gives them back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cellmesh.controller.session.launch.node_holder import NodeHolder
from cellmesh.errors import HostError, MeshUsageError

HOLDER = """
import json, sys
from cellmesh.controller.session.launch.node_holder import hold, say
asked = json.loads(sys.argv[1])
print("what else is printed")
say({"waiting": "for nodes"})
if "says" in asked:
    say(asked["says"])
    sys.exit()
say({"nodes": ["a", "b"]})
try:
    hold()
except BaseException:
    open(asked["path"], "w").close()
"""
COMMAND = (sys.executable, "-c", HOLDER)


def test_nodes_are_given_back_at_the_end_of_the_context(tmp_path: Path) -> None:
    waited: list[str] = []
    with NodeHolder() as holder:
        said = holder.ask(COMMAND, {"path": str(tmp_path / "given back")}, waited.append)
        assert said["nodes"] == ["a", "b"]
        assert waited == ["for nodes"]
        assert not list(tmp_path.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["given back"]


def test_nodes_are_kept_for_a_mesh_that_has_started(tmp_path: Path) -> None:
    with NodeHolder() as holder:
        holder.ask(COMMAND, {"path": str(tmp_path / "given back")}, lambda text: None)
        process = holder._process
        assert process is not None
        holder.keep()
    assert process.wait(30) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ({"usage": "fewer"}, MeshUsageError, "fewer"),
        ({"problem": "none"}, HostError, "none"),
        ({}, HostError, "what asks for nodes has failed"),
    ],
)
def test_refusal_of_the_engine_is_raised(
    says: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), NodeHolder() as holder:
        holder.ask(COMMAND, {"says": says}, lambda text: None)
