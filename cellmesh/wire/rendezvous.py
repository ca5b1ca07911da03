"""What a host's agent and the notebook say to each other before the agent runs, where an engine, or
a person, has started ``cellmesh agent`` without a ticket of the host's own.

The host connects to the notebook's listener (`Invitation`) by TCP, with CURVE. Each message is a
word and a text::

    host -> notebook    arrived    `HostFacts`; once a second until the agent is let go
                        said       `Announcement`
    notebook -> host    ticket     the agent's ticket
                        order      a line, such as `GO`
                        refused    why, for a person
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import HostError
from .host import Place, Versions, host_name, own_versions, this_place
from .own_file import Secret, from_json

ARRIVED, SAID, TICKET, ORDER, REFUSED = b"arrived", b"said", b"ticket", b"order", b"refused"
# How often a host that waits says that it does.
AGAIN_S = 1.0
_KEY = r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"  # Z85
# What an engine that numbers its hosts sets: cellmesh's Ray driver or another command, torchrun,
# Kubernetes (an Indexed Job), Slurm, Open MPI, other MPIs.
_NUMBERS = (
    *("CELLMESH_HOST_NUMBER", "GROUP_RANK", "JOB_COMPLETION_INDEX", "SLURM_PROCID"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
_NAMES = ("CELLMESH_HOST_NAME", "SLURMD_NODENAME")
_JOBS = ("CELLMESH_JOB", "SLURM_JOB_ID")


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ticket by which hosts join a mesh: where they announce themselves, and the keys.

    Whoever has it may take a host's part in the mesh.

    Attributes:
        mesh: the mesh's name.
        endpoint: of the notebook's listener, ``tcp://address:port``.
        public_key: the listener's, of CURVE (Z85).
        secret: CURVE's secret key of hosts that announce themselves (Z85).
    """

    mesh: str
    endpoint: str
    public_key: str
    secret: Secret


class HostFacts(msgspec.Struct, frozen=True):
    """What a host reports of itself when it joins: its addresses, GPUs, versions.

    Attributes:
        name: its host name.
        place: host, boot and PID namespace.
        pid: of the process that announces it.
        addresses: of its interfaces.
        gpus: their models.
        versions: of what it has installed.
        number: its place among the mesh's hosts, if its engine numbers them; -1 if not.
    """

    name: str
    place: Place
    pid: int
    addresses: tuple[str, ...]
    gpus: tuple[str, ...]
    versions: Versions
    number: int = -1


class _Head(msgspec.Struct):
    """The fields that an invitation has and a ticket has not, of any type."""

    key: Any = msgspec.UNSET
    endpoint: Any = msgspec.UNSET


def parse_invitation(text: bytes) -> Invitation | None:
    """Read an invitation; None if the text is another kind of ticket.

    Raises:
        HostError: it is damaged.
    """
    try:
        head = from_json(text, _Head)
    except ValueError:
        return None
    if head.key is not msgspec.UNSET or head.endpoint is msgspec.UNSET:
        return None
    try:
        invitation = from_json(text, Invitation)
        for key in (invitation.public_key, invitation.secret):
            if not re.fullmatch(_KEY, key):
                raise ValueError("a key is cut or changed")
        return invitation
    except ValueError as error:
        raise HostError(
            f"the ticket is damaged ({error}): copy all of its file, which is one line"
        ) from error


def own_facts(environment: Mapping[str, str]) -> HostFacts:
    """Return the facts that this host reports of itself.

    Args:
        environment: of this process.
    """
    return HostFacts(
        host_name(),
        this_place(),
        os.getpid(),
        tuple(own_addresses()),
        tuple(_own_gpus(environment.get("CUDA_VISIBLE_DEVICES"))),
        own_versions(),
        number_of_host(environment),
    )


def number_of_host(environment: Mapping[str, str]) -> int:
    """Return this host's place among the mesh's hosts, as its engine numbers them; -1 if not."""
    numbers = (environment[name] for name in _NUMBERS if environment.get(name, "").isdecimal())
    return int(next(numbers, -1))


def name_of_host(environment: Mapping[str, str]) -> str:
    """Return the name that an engine has for this host, or its own."""
    return next((environment[name] for name in _NAMES if environment.get(name)), host_name())


def job_of_host(environment: Mapping[str, str]) -> str:
    """Return the engine's job that this host's agent is started in; "" without such."""
    return next((environment[name] for name in _JOBS if environment.get(name)), "")


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, but for the loopback's."""
    return [
        address
        for name, addresses in addresses_by_interface().items()
        for address in addresses
        if name != "lo"
    ]


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each of this host's interfaces."""
    import psutil  # not for meshes on one host

    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _own_gpus(visible: str | None) -> list[str]:
    """Return the models of GPUs, as the driver lists them: no CUDA is initialised."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
        models.append(lines.get("Model", "GPU").strip())
    if visible is not None:
        models = models[: len([word for word in visible.split(",") if word.strip()])]
    return models
