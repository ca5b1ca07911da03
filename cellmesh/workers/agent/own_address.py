"""Chooses the address of this host under which its agent and ranks are reached."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping

from ...errors import HostError
from ...wire.hosts import HostPart
from ...wire.rendezvous import addresses_by_interface


def choose_address(
    part: HostPart, address: str, interface: str, launch: str, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Choose the address of the agent and its interface.

    Args:
        part: says where the notebook's host is.
        address, interface: as the user has chosen; "" for none.
        launch: the command line that has started the agent; "" for ssh.
        environment: may have ``SSH_CONNECTION`` of sshd.

    Raises:
        HostError: there is no such interface, or it has no address.
    """
    import psutil  # not for agents of meshes on one host

    by_interface = addresses_by_interface()
    if interface and not address:
        found = by_interface.get(interface, [])
        if not found:
            there = ", ".join(name for name, addresses in by_interface.items() if addresses)
            raise HostError(
                f"{socket.gethostname()} has no interface {interface} with an address ({there})"
            )
        if not psutil.net_if_stats()[interface].isup:
            raise HostError(f"interface {interface} of {socket.gethostname()} is down")
        return found[0], interface
    dialled = _dialled_by_ssh(launch, environment)
    if not any(dialled in addresses for addresses in by_interface.values()):
        dialled = ""
    chosen = address or dialled or _route_to(part.notebook)
    if ipaddress.ip_address(chosen).is_unspecified:
        raise HostError("an agent is not bound to every address: name one of this host")
    names = [name for name, addresses in by_interface.items() if chosen in addresses]
    if not names:
        raise HostError(f"{socket.gethostname()} has no interface with the address {chosen}")
    return chosen, names[0]


def _dialled_by_ssh(launch: str, environment: Mapping[str, str]) -> str:
    """Return the address of this host to which the notebook's ssh has connected; "" without ssh.

    Other launchers hand on the ``SSH_CONNECTION`` of the session that they were started in, which
    says nothing of the way to the notebook: srun that of a login node, say.
    """
    words = environment.get("SSH_CONNECTION", "").split()
    is_ssh = not launch or os.path.basename(launch.split()[0]) == "ssh"
    return words[2] if is_ssh and len(words) == 4 else ""


def _route_to(addresses: tuple[str, ...]) -> str:
    """Return this host's address on the way to another; the loopback's if there is no way.

    A name may stand for the loopback here and for another host there, so it is the last choice.
    """
    for name in addresses:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((name, 9))  # no packet is sent: the kernel looks up the route
            address = str(way.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return "127.0.0.1"
