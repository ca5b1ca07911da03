"""The resources that the Ray driver asks for, and its text where the cluster is too small."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.controller.session.launch.ray_driver import choose_bundle, explain_shortage


def node(name: str, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerHostname": name, "Alive": is_alive, "Resources": resources}


NODES = [node("a", CPU=8.0), node("b", CPU=2.0, GPU=2.0), node("c", False, CPU=64.0, GPU=8.0)]


@pytest.mark.parametrize(
    ("nodes", "resources", "may_use_gpus", "bundle"),
    [
        (NODES, {}, True, {"CPU": 2.0, "GPU": 2.0}),
        (NODES, {}, False, {"CPU": 2.0}),
        ([NODES[0], NODES[2]], {}, True, {"CPU": 2.0}),
        (NODES, {"fast": 1.0}, True, {"fast": 1.0}),
    ],
)
def test_each_rank_gets_a_cpu_and_a_gpu_where_there_are_some(
    nodes: list[dict[str, Any]],
    resources: dict[str, float],
    may_use_gpus: bool,
    bundle: dict[str, float],
) -> None:
    assert choose_bundle(nodes, 2, resources, may_use_gpus) == bundle


def test_shortage_is_explained_by_what_is_there() -> None:
    assert explain_shortage(NODES, 2, {"CPU": 2.0}) == ""
    said = explain_shortage(NODES, 2, {"CPU": 2.0, "GPU": 1.0})
    assert said.startswith("2 nodes with CPU=2, GPU=1 each are asked for, and 1 of the Ray")
    assert "cluster's 2 nodes have that (a: CPU=8, GPU=0; b: CPU=2, GPU=2)" in said
