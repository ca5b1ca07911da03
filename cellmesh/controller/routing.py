"""Passes messages (`wire.peer_calls.Routed`) on between ranks of this process's meshes that have no
socket to each other, and reports to a rank the end of another one with which it has exchanged some.

Each link's thread passes on what its own mesh's ranks send, so ranks call each other also while the
notebook executes a cell.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from ..wire.codec import Parcel, encode
from ..wire.handles import mark_of
from ..wire.messages import Died, Relay
from ..wire.peer_calls import Routed
from ..wire.ticket import Ticket
from .core.effects import Change, Send


class RoutedMesh(Protocol):
    """Protocol of the part of a `Session` that a `Router` needs."""

    name: str
    ticket: Ticket
    num_ranks: int
    core: Any
    runs: Any


class Router:
    """Passes on the messages between ranks of meshes."""

    def __init__(self) -> None:
        self._meshes, self._lock = dict[str, RoutedMesh](), threading.Lock()
        # Pairs of ranks, by mark and number, that have exchanged messages.
        self._pairs: dict[tuple[str, int], set[tuple[str, int]]] = {}

    def add(self, mesh: RoutedMesh) -> Router:
        """Pass on messages of a mesh until it ends or is left; return this object."""
        self._meshes[mark_of(mesh.ticket.key)] = mesh
        return self

    def carry(self, mesh: RoutedMesh, rank: int, parcel: Parcel[Routed]) -> None:
        """Pass on the message of a rank; if that is impossible, report why."""
        message, own = parcel.verb, (mark_of(mesh.ticket.key), rank)
        to, other = (message.mark, message.rank), self._meshes.get(message.mark)
        if other is None:
            why = "cannot be called: its mesh has ended, or this rank's notebook does not have it"
        else:
            with self._lock:  # first, as the other may die at any time
                for one, another in ((own, to), (to, own)):
                    self._pairs.setdefault(one, set()).add(another)
            why = _why_not(other, message.rank)
        if other is not None and not why:
            sent = msgspec.structs.replace(message, mark=own[0], rank=rank)
            _send(other, message.rank, Parcel(sent, parcel.buffers))
        elif not message.why_lost:
            _send(mesh, rank, Parcel(Routed(*to, why_lost=why)))

    def note(self, mesh: RoutedMesh, change: Change) -> None:
        """Handle a change of the state of a mesh."""
        if isinstance(died := change.cause, Died):
            self._lose(mesh, (died.rank,), f"of {mesh.name} {died.reason}")
        elif change.state == "restarting":
            self._lose(mesh, range(mesh.num_ranks), f"of {mesh.name} was restarted")
        elif change.state == "ended":
            why = f"of {mesh.name} cannot be reached: its mesh has ended, or its notebook left it"
            self._lose(mesh, range(mesh.num_ranks), why)
            if self._meshes.get(mark := mark_of(mesh.ticket.key)) is mesh:
                del self._meshes[mark]

    def note_resized(self, mesh: RoutedMesh, num_ranks: int) -> None:
        """Handle a change of the number of ranks of a mesh."""
        gone = range(num_ranks, mesh.num_ranks)
        self._lose(mesh, gone, f"of {mesh.name} was removed by a resize")

    def _lose(self, mesh: RoutedMesh, ranks: Collection[int], why: str) -> None:
        """Report the end of ranks of a mesh to those that have exchanged messages with them."""
        mark = mark_of(mesh.ticket.key)
        for rank in ranks if self._pairs else ():
            with self._lock:
                others = self._pairs.pop((mark, rank), set())
                for each in others:
                    self._pairs.get(each, set()).discard((mark, rank))
            for other_mark, other_rank in others:
                if (other := self._meshes.get(other_mark)) is not None:
                    _send(other, other_rank, Parcel(Routed(mark, rank, why_lost=why)))


@functools.cache
def own_router() -> Router:
    """Return the router of this process's meshes."""
    return Router()


def _why_not(mesh: RoutedMesh, rank: int) -> str:
    """Return why no message can be passed on to a rank of a mesh now; "" if it can."""
    if mesh.core.state != "ready":
        return f"of {mesh.name} cannot be called: the mesh is {mesh.core.state}"
    if rank >= mesh.num_ranks:
        return f"of {mesh.name} was removed by a resize"
    died = mesh.core.dead.get(rank)
    return "" if died is None else f"of {mesh.name} {died.reason}"


def _send(mesh: RoutedMesh, rank: int, parcel: Parcel[Routed]) -> None:
    frames = encode([parcel])
    order = Parcel(Relay((rank,), "control", -1, len(frames)), tuple(frames))
    mesh.runs.post_if_open(lambda core, now: [Send(order)])
