"""The address of the notebook's host at which other hosts announce themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from ....errors import MeshUsageError
from ....wire.rendezvous import addresses_by_interface

# Of the documentation (RFC 5737): no packet is sent, the kernel looks up its route.
_ELSEWHERE = "192.0.2.1"


def choose_own_address(wanted: str) -> str:
    """Choose the address of this host at which other hosts announce themselves.

    Args:
        wanted: an address, or an interface; "" for that of the route to other networks.

    Raises:
        MeshUsageError: this host has no such address, or several and none was chosen.
    """
    return choose(wanted, addresses_by_interface(), route_address())


def choose(wanted: str, by_interface: Mapping[str, Sequence[str]], routed: str) -> str:
    """Choose an address. Pure.

    Args:
        wanted: an address or an interface, as the user has said; "" for none.
        by_interface: this host's addresses.
        routed: that of the route to other networks; "" without such a route.

    Raises:
        MeshUsageError: there is no such address, or several, and none was chosen.
    """
    known = {address for addresses in by_interface.values() for address in addresses}
    there = ", ".join(f"{name} {' '.join(all_)}" for name, all_ in by_interface.items() if all_)
    if wanted:
        found = by_interface.get(wanted, [wanted] if wanted in known else [])
        if not found:
            raise MeshUsageError(
                f"--address {wanted}: this host has no such address or interface ({there})"
            )
        return found[0]
    if routed:
        return routed
    others = [
        address for name, addresses in by_interface.items() if name != "lo" for address in addresses
    ]
    if len(others) != 1:
        raise MeshUsageError(
            "at which address do the other hosts find this one? Say it, like --address eth0 "
            f"({there})"
        )
    return others[0]


def route_address() -> str:
    """Return this host's address on its way to other networks; "" if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((_ELSEWHERE, 9))
        return str(way.getsockname()[0])
    return ""
