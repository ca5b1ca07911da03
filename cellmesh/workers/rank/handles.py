"""Handles of actors on a rank: the object itself where the rank has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...wire.handles import Address, Peer, Stray, mark_of
from ...wire.ticket import read_ticket
from .actors import Actors
from .value_transfer import reduce_for_notebook


class Handles:
    """The handles that have arrived on a rank, and those of its own objects that leave it.

    Args:
        directory: directory of its mesh on this host.
        rank: the rank.
        actors: its actors.
    """

    def __init__(self, directory: Path, rank: int, actors: Actors) -> None:
        ticket = read_ticket(directory / "ticket.json")
        self._peer = Peer(mark_of(ticket.key), ticket.name, str(directory), rank)
        self._actors, self._pid = actors, os.getpid()

    def open(self, address: Address) -> Any:
        """Return what a handle is on this rank; None in a process that the rank has forked."""
        peer = self._peer
        if os.getpid() != self._pid:
            return None
        if address.mark == peer.mark and peer.rank in address.ranks:
            found = self._actors.get(address.actor)
            return (
                Stray(address, "is not on this rank any more: mesh.spawn it again")
                if found is None
                else found
            )
        return Stray(address, "cannot be called by other ranks yet")

    def reduce(self, value: Any) -> Any:
        """Return a pickle reduction of a value that leaves this rank, as `reduce_for_notebook`; the
        object of an actor leaves it as its handle.
        """
        if name := self._actors.name_of(value):
            peer, kind = self._peer, type(value).__name__
            place = (peer.mark, peer.mesh, peer.directory)
            return Address(*place, name, kind, (peer.rank,)).reduce()
        return reduce_for_notebook(value)
