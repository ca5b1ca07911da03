"""Uses Ray for a mesh, in a process of its own: ``python -m
cellmesh.controller.session.launch.ray_driver``.

``reserve JSON`` makes a placement group, prints its nodes' names, and removes it unless the mesh
starts. ``run GROUP NODE COMMAND...`` runs an agent's command in the node's bundle, with
this process's standard input and output; once the agent was told to go on, an actor of Ray's stays
with it in place of this process.

Group and actors are detached: they outlive the notebook, and the last actor removes the group.
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
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....wire.descriptors import wait_readable
from ....wire.hosts import ANNOUNCEMENT, GO
from .node_holder import hold, say
from .ray import bundle_of, choose_bundle, explain_shortage

_NAMESPACE = "cellmesh"
_ASK_S = 0.5
_REPORT_S = 2.0
_CONNECT_S = 10.0
# An agent that nobody lets go on ends after this time, as its mesh's start was given up.
_START_S = 600.0


class AgentActor:
    """Runs one agent's command on a node of Ray, and stays as long as the command runs.

    Ray sends this class by value, as nodes need not find cellmesh for the Python of their workers.

    Args:
        group: the placement group.
        name: the actor's own.
    """

    def __init__(self, group: str, name: str) -> None:
        self._group, self._name = group, name
        self._process: subprocess.Popen[bytes] | None = None
        self._give_up = threading.Timer(_START_S, self._end)
        self._give_up.daemon = True

    def start(self, command: Sequence[str], ticket: bytes) -> tuple[bytes, int | None]:
        """Run the command until it has announced its agent, or has ended.

        Returns:
            What it has printed, and its status if it has ended.
        """
        # The environment that Ray was started with on this node, and the GPUs that Ray gives: what
        # else it sets in its workers (OMP_NUM_THREADS, PYTHONBREAKPOINT) is not for ranks.
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            lines = file.read().split(b"\0")
        environment = dict(line.split(b"=", 1) for line in lines if b"=" in line)
        environment |= {
            name: value for name, value in os.environb.items() if name.endswith(b"VISIBLE_DEVICES")
        }
        # Where Ray ends this process, the agent ends in order: the command is a grandchild, as Ray
        # kills children.
        below = ["sh", "-c", 'setpriv --pdeathsig TERM -- "$@"; exit $?', "sh", *command]
        guarded = ["setpriv", "--pdeathsig", "KILL", "--", *below]
        self._process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._give_up.start()
        return self.order(ticket)

    def order(self, line: bytes) -> tuple[bytes, int | None]:
        """Write a line to the agent's standard input; wait for its announcement or its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: its output says why
        text = b""
        while line := self._process.stdout.readline():
            text += line
            if line.startswith(ANNOUNCEMENT.encode()):
                return text, None
        return text, self._process.wait()

    def go(self) -> None:
        """Have the agent go on without those who have started it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._give_up.cancel()
        self._process.stdin.write(GO)
        self._process.stdin.close()
        threading.Thread(target=self._stay, daemon=True).start()

    def _stay(self) -> None:
        """Wait for the agent's end, and for that of all others if this is the first actor of them;
        then the group is removed.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        while self._process.stdout.readline():
            pass
        self._process.wait()
        while True:
            named = ray.util.list_named_actors()
            others = [each for each in named if each.startswith(f"{self._group}:")]
            others = [each for each in others if each != self._name]
            if not others:
                remove_placement_group(ray.util.get_placement_group(self._group))
            if not others or min(others) < self._name:
                self._end()
                return
            time.sleep(_ASK_S)

    def _end(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)


def main() -> None:
    """Run the command that the arguments name."""
    what, *arguments = sys.argv[1:]
    logging.disable(logging.WARNING)
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        if found := re.fullmatch(r"(?:\w+://)?(.+):(\d+)", address):
            # Ray itself tries for minutes.
            socket.create_connection((found[1].strip("[]"), int(found[2])), _CONNECT_S).close()
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except Exception as error:
        text = (
            f"--launch ray: no Ray cluster is reached at {address!r} ({str(error).splitlines()[0]})"
            ": start one with `ray start --head`, and run the notebook on one of its nodes, or set "
            "RAY_ADDRESS"
        )
        say({"problem": text})
        sys.exit(text)
    if what == "reserve":
        reserve(**json.loads(arguments[0]))
    else:
        sys.exit(run(arguments[0], arguments[1], arguments[2:]))


def reserve(
    group: str,
    nodes: int,
    ranks_per_node: int,
    resources: Mapping[str, float],
    may_use_gpus: bool,
    timeout_s: float | None,
) -> None:
    """Make a placement group, send the notebook its nodes, and hold them until the mesh has
    started.
    """
    bundle = choose_bundle(ray.nodes(), ranks_per_node, resources, may_use_gpus)
    shortage = explain_shortage(ray.nodes(), nodes, bundle)
    if shortage and timeout_s is None:
        say({"usage": shortage})
        return
    made = placement_group(
        [bundle] * nodes, strategy="STRICT_SPREAD", name=group, lifetime="detached"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    began, reported_at = time.monotonic(), -_REPORT_S
    try:
        while not made.wait(_ASK_S):
            now = time.monotonic()
            if _has_ended(0.0):
                sys.exit("the notebook waits no longer")
            free = sum(
                all(there.get(name, 0.0) >= amount for name, amount in bundle.items())
                for there in ray._private.state.available_resources_per_node().values()
            )
            text = f"{free} of {nodes} nodes of Ray are free"
            if timeout_s is not None and now > began + timeout_s:
                why = explain_shortage(ray.nodes(), nodes, bundle) or f"{text} for {bundle}"
                say({"problem": f"Ray did not give the nodes within {timeout_s:.0f} s: {why}"})
                sys.exit(1)
            if now > reported_at + _REPORT_S:
                reported_at = now
                say({"waiting": text})
        hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        by_bundle = ray.util.placement_group_table(made)["bundles_to_node_id"]
        say({"nodes": [hosts[by_bundle[index]] for index in range(nodes)]})
        hold()
    except BaseException:
        remove_placement_group(made)
        raise


def run(group: str, node: str, command: Sequence[str]) -> int:
    """Run an agent's command in its bundle; return the exit code."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        return _run(group, node, command, stdin)


def _run(group: str, node: str, command: Sequence[str], stdin: IO[bytes]) -> int:
    ticket = stdin.readline()
    bundle, made = bundle_of(node), ray.util.get_placement_group(group)
    prefix = f"{group}:{bundle:04d}:"
    for other in ray.util.list_named_actors():
        if other.startswith(prefix):  # it waits for the others, and its agent is lost
            ray.kill(ray.get_actor(other))
    amounts = dict(made.bundle_specs[bundle])
    name = f"{prefix}{time.time_ns()}"
    actor: Any = (
        ray.remote(AgentActor)
        .options(
            name=name,
            lifetime="detached",
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            max_concurrency=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(made, bundle),
        )
        .remote(group, name)
    )
    answer = actor.start.remote(list(command), ticket)
    status = None
    while status is None:
        while not ray.wait([answer], timeout=_ASK_S / 10)[0]:
            if _has_ended(0.0):
                status = 1
                break
        else:
            text, status = ray.get(answer)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if status is None:
            line = stdin.readline()
            if line == GO:
                ray.get(actor.go.remote())
                return 0
            status = 1
    ray.kill(actor)
    if not json.loads(ticket)["host"]["joins"]:
        remove_placement_group(made)  # the mesh's start has failed
    return status


def _has_ended(timeout_s: float) -> bool:
    """Whether the standard input has ended within a time; nothing is written to it yet."""
    return bool(wait_readable([0], timeout_s))


if __name__ == "__main__":
    main()
