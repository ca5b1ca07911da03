"""Nodes of a Ray cluster for a mesh: a placement group with a bundle of resources on each node, in
which agents are started.

Ray runs in processes of its own (`ray_driver`), not in the notebook's: it is imported only where it
is asked for, and a notebook may use Ray for itself.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....errors import HostError
from ...node_request import Allocation, NodeRequest, resources_of
from .node_holder import NodeHolder

_DRIVER = (sys.executable, "-m", "cellmesh.controller.session.launch.ray_driver")


def allocate(
    request: NodeRequest, name: str, report: Callable[[str], None], holder: NodeHolder
) -> Allocation:
    """Reserve nodes of the Ray cluster that this process finds. Blocks while they are in use.

    Args:
        request: what was asked for.
        name: begins the placement group's name.
        report: called with what is waited for.
        holder: removes the placement group unless the mesh starts.

    Raises:
        HostError: Ray is not installed, there is no cluster, or its nodes are not free in time.
        MeshUsageError: the cluster does not have such nodes.
    """
    if importlib.util.find_spec("ray") is None:
        raise HostError(
            "--launch ray: Ray is not installed for the notebook's Python: install the cluster's "
            f"version, like `{sys.executable} -m pip install ray`"
        )
    group = f"{name}-{os.urandom(4).hex()}"
    asked = {
        "group": group,
        "nodes": request.nodes,
        "ranks_per_node": request.ranks_per_node,
        "resources": resources_of(request.arguments),
        "may_use_gpus": request.may_use_gpus,
        "timeout_s": request.queue_timeout_s,
    }
    report("waiting for Ray")
    return allocation_of(group, holder.ask((*_DRIVER, "reserve"), asked, report)["nodes"])


def allocation_of(group: str, nodes: Sequence[str]) -> Allocation:
    """Describe how agents are started in the bundles of a placement group.

    Args:
        group: its name.
        nodes: the host name of each bundle's node; two nodes of Ray may be on one machine.
    """
    template = shlex.join([*_DRIVER, "run", group]) + " {host} {command}"
    return Allocation(
        tuple(f"{_as_name(node)}.{index}" for index, node in enumerate(nodes)),
        template,
    )


def is_rays(template: str) -> bool:
    """Whether a command line starts agents in what Ray has reserved."""
    return _DRIVER[-1] in template


def bundle_of(name: str) -> int:
    """Return the number of the bundle that a node's name ends with."""
    return int(name.rpartition(".")[2])


def choose_bundle(
    nodes: Sequence[Mapping[str, Any]],
    ranks_per_node: int,
    resources: Mapping[str, float],
    may_use_gpus: bool,
) -> dict[str, float]:
    """Choose what each node gives: by default a CPU and, where there are some, a GPU for each rank.

    Args:
        nodes: as ``ray.nodes()`` describes them.
        resources: what the user has asked for.
    """
    if resources:
        return dict(resources)
    has_gpus = any(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    chosen = {"CPU": float(ranks_per_node)}
    return chosen | ({"GPU": float(ranks_per_node)} if has_gpus and may_use_gpus else {})


def explain_shortage(
    nodes: Sequence[Mapping[str, Any]], num_nodes: int, bundle: Mapping[str, float]
) -> str:
    """Say what the cluster lacks, and what it has; "" if enough of its nodes are large enough."""
    alive = [node for node in nodes if node["Alive"]]
    fitting = [
        node
        for node in alive
        if all(node["Resources"].get(name, 0.0) >= amount for name, amount in bundle.items())
    ]
    if len(fitting) >= num_nodes:
        return ""
    there = "; ".join(
        f"{node['NodeManagerHostname']}: {_describe(node['Resources'], bundle)}" for node in alive
    )
    return (
        f"{num_nodes} nodes with {_describe(bundle, bundle)} each are asked for, and "
        f"{len(fitting)} of the Ray cluster's {len(alive)} nodes have that ({there}): ask for "
        "fewer --nodes or --nproc-per-host, or say what a node gives, like --launch-args 'CPU=1'"
    )


def _describe(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={resources.get(name, 0.0):g}" for name in names)


def _as_name(node: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", node).lstrip(".-") or "node"
