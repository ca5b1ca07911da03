"""Starts agents on nodes of a Ray cluster with Ray's public API, and runs as long as they do:
``python -m cellmesh.controller.session.launch.ray_driver``.

``start JSON COMMAND...`` waits for a placement group with a bundle of resources on each node, runs
the agents' command in each bundle, with this process's standard input, and prints the agents'
announcements. Ray ends the group and the agents with this process. ``again GROUP NODE COMMAND...``
runs the command again in the bundle of a node whose agent is lost.

The notebook's own process does not connect to Ray, so that user code in it may.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....errors import HostError
from ....wire.hosts import ANNOUNCEMENT, GO, WAITING, Announcement
from ....wire.process import wait_readable

_NAMESPACE = "cellmesh"
_ASK_S = 0.5
_CONNECT_S = 10.0


class AgentActor:
    """A Ray actor that runs one agent's command on a node.

    Ray sends this class by value, as nodes need not find cellmesh for the Python of their workers.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], ticket: bytes, variables: Mapping[str, str]
    ) -> tuple[bytes, int | None]:
        """Run the agent's command on this node until the agent has announced itself or the command
        has ended.

        Returns:
            Its output, and its exit status if it has ended.
        """
        # Ranks get the environment that Ray was started with on this node, and the GPUs that Ray
        # gives; other variables that it sets in its workers (OMP_NUM_THREADS, PYTHONBREAKPOINT) are
        # not for them.
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            lines = file.read().split(b"\0")
        environment = dict(line.split(b"=", 1) for line in lines if b"=" in line)
        environment |= {
            name: value for name, value in os.environb.items() if name.endswith(b"VISIBLE_DEVICES")
        }
        environment |= {name.encode(): value.encode() for name, value in variables.items()}
        # Where Ray ends this process, the agent ends in order: the command is a grandchild, as Ray
        # kills children.
        below = ["sh", "-c", 'setpriv --pdeathsig TERM -- "$@"; exit $?', "sh", *command]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *below],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(ticket)
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: its output has the reason
        text = b""
        while line := self._process.stdout.readline():
            text += line
            if line.startswith(ANNOUNCEMENT.encode()):
                return text, None
        return text, self._process.wait()

    def go(self) -> None:
        """Let the agent run on without the notebook, and wait for its end."""
        assert self._process is not None
        try:
            self._process.communicate(GO)
        except OSError:
            self._process.wait()


def main() -> None:
    """Start agents on new nodes, or again on one node, as the command-line arguments request."""
    what, *arguments = sys.argv[1:]
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        ticket = stdin.readline()
        try:
            _connect(os.environ.get("RAY_ADDRESS", "auto"))
            if what == "start":
                asked = json.loads(arguments[0])
                run(_reserve(**asked), range(asked["nodes"]), arguments[1:], ticket, stdin)
            else:
                group, node, *command = arguments
                bundle = int(node.rpartition(".")[2])
                run(get_placement_group(group), [bundle], command, ticket, stdin)
        except (HostError, ValueError) as error:
            problem = msgspec.json.encode(Announcement(problem=str(error))).decode()
            print(f"{ANNOUNCEMENT}{problem}", flush=True)
            sys.exit(1)


def _connect(address: str) -> None:
    try:
        if found := re.fullmatch(r"(?:\w+://)?(.+):(\d+)", address):
            # Ray itself tries for minutes.
            socket.create_connection((found[1].strip("[]"), int(found[2])), _CONNECT_S).close()
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False
        )
    except Exception as error:
        raise HostError(
            f"--launch ray: no Ray cluster is reached at {address!r} ({str(error).splitlines()[0]})"
            ": start one with `ray start --head`, and run the notebook on one of its nodes, or set "
            "RAY_ADDRESS"
        ) from error


def _reserve(
    mesh: str, nodes: int, ranks_per_node: int, resources: Mapping[str, float]
) -> PlacementGroup:
    """Request a placement group from Ray, and return it once Ray has reserved its nodes.

    Raises:
        SystemExit: the notebook has stopped waiting.
    """
    bundle = choose_bundle(ray.nodes(), ranks_per_node, resources)
    name = f"{mesh}-{os.urandom(4).hex()}"
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD", name=name)
    while not group.wait(_ASK_S):
        if _has_ended():
            sys.exit("the notebook waits no longer")
        each, free = describe(bundle, bundle), describe(ray.available_resources(), bundle)
        text = f"{nodes} nodes of Ray with {each} each; {free} are free in all (`ray status`)"
        print(f"{WAITING}{text}", flush=True)
    return group


def run(
    group: PlacementGroup,
    bundles: Sequence[int],
    command: Sequence[str],
    ticket: bytes,
    stdin: IO[bytes],
) -> None:
    """Run the agents' command in bundles of a placement group, until all agents have ended.

    Raises:
        SystemExit: an agent has not started, or the notebook has ended before its mesh was ready.
    """
    table = placement_group_table(group)
    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    actors, started = [], {}
    try:
        for index in bundles:
            actor = _actor_in(group, index)
            actors.append(actor)
            host = re.sub(r"[^A-Za-z0-9_.-]", "-", names[table["bundles_to_node_id"][index]])
            variables = {
                "CELLMESH_HOST_NUMBER": str(index),
                "CELLMESH_HOST_NAME": f"{host.lstrip('.-') or 'node'}.{index}",
                "CELLMESH_JOB": table["name"],
            }
            started[actor.start.remote(list(command), ticket, variables)] = actor
        waiting, status = list(started), 0
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_ASK_S / 10)
            for text, ended in ray.get(done):
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
                status = status if ended is None else 1
            if status or _has_ended():
                sys.exit(1)
        if stdin.readline() != GO:
            sys.exit(1)
        ends = {actor.go.remote(): actor for actor in actors}
        while ends:
            for end in ray.wait(list(ends))[0]:
                ray.kill(ends.pop(end))  # its bundle is free for another
    finally:
        for actor in actors:
            ray.kill(actor)


def _actor_in(group: PlacementGroup, bundle: int) -> Any:
    amounts = dict(group.bundle_specs[bundle])
    options: Any = ray.remote(AgentActor).options(
        num_cpus=amounts.pop("CPU", 0),
        num_gpus=amounts.pop("GPU", 0),
        resources=amounts,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    )
    return options.remote()


def choose_bundle(
    nodes: Sequence[Mapping[str, Any]], ranks_per_node: int, resources: Mapping[str, float]
) -> dict[str, float]:
    """Choose the resources to reserve on each node: by default a CPU and, if the cluster has GPUs,
    a GPU for each rank.

    Args:
        nodes: descriptions of the nodes, from ``ray.nodes()``.
        ranks_per_node: number of ranks on each node.
        resources: resources that the user has chosen, name -> amount; empty for the default.
    """
    has_gpus = any(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    kinds = ("CPU", "GPU") if has_gpus else ("CPU",)
    return dict(resources) or dict.fromkeys(kinds, float(ranks_per_node))


def describe(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    """Return the amounts of the named resources as text, like ``CPU=4, GPU=1``."""
    return ", ".join(f"{name}={resources.get(name, 0.0):g}" for name in names)


def _has_ended() -> bool:
    """Return whether the standard input, from which the ticket was read, has ended."""
    return bool(wait_readable([0], 0.0))


if __name__ == "__main__":
    main()
