"""Passes messages on between ranks of this process's meshes that have no socket to each other
(`wire/mail.py`), and tells a rank if another one with which it had such messages is gone.

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
from ..wire.mail import Mail
from ..wire.messages import Died, Relay
from ..wire.ticket import Ticket
from .core.effects import Change, Send


class Office(Protocol):
    """Protocol of the part of a `Session` that has to do with mail."""

    name: str
    ticket: Ticket
    num_ranks: int
    core: Any
    runs: Any


class Mailroom:
    """The mail between ranks of meshes."""

    def __init__(self) -> None:
        self._offices, self._lock = dict[str, Office](), threading.Lock()
        # Pairs of ranks, by mark and number, that have had mail of each other.
        self._pairs: dict[tuple[str, int], set[tuple[str, int]]] = {}

    def admit(self, office: Office) -> Mailroom:
        """Let the ranks of a mesh have mail, until it ends or is left; return this object."""
        self._offices[mark_of(office.ticket.key)] = office
        return self

    def carry(self, office: Office, rank: int, parcel: Parcel[Mail]) -> None:
        """Pass on the message of a rank; if it cannot be passed on, tell the rank."""
        mail, own = parcel.verb, (mark_of(office.ticket.key), rank)
        to, other = (mail.mark, mail.rank), self._offices.get(mail.mark)
        if other is None:
            why = "cannot be called: its mesh has ended, or this rank's notebook does not have it"
        else:
            with self._lock:  # first, as the other may die at any time
                for one, another in ((own, to), (to, own)):
                    self._pairs.setdefault(one, set()).add(another)
            why = _why_not(other, mail.rank)
        if other is not None and not why:
            sent = msgspec.structs.replace(mail, mark=own[0], rank=rank)
            _send(other, mail.rank, Parcel(sent, parcel.buffers))
        elif not mail.why_lost:
            _send(office, rank, Parcel(Mail(*to, why_lost=why)))

    def note(self, office: Office, change: Change) -> None:
        """Handle a change of the state of a mesh."""
        if isinstance(died := change.cause, Died):
            self._lose(office, (died.rank,), f"of {office.name} {died.reason}")
        elif change.state == "restarting":
            self._lose(office, range(office.num_ranks), f"of {office.name} was restarted")
        elif change.state == "ended":
            why = f"of {office.name} cannot be reached: its mesh has ended, or its notebook left it"
            self._lose(office, range(office.num_ranks), why)
            if self._offices.get(mark := mark_of(office.ticket.key)) is office:
                del self._offices[mark]

    def note_resized(self, office: Office, num_ranks: int) -> None:
        """Handle a change of the number of ranks of a mesh."""
        gone = range(num_ranks, office.num_ranks)
        self._lose(office, gone, f"of {office.name} was removed by a resize")

    def _lose(self, office: Office, ranks: Collection[int], why: str) -> None:
        """Tell the ranks that have had mail of ranks of a mesh that these are gone."""
        mark = mark_of(office.ticket.key)
        for rank in ranks if self._pairs else ():
            with self._lock:
                others = self._pairs.pop((mark, rank), set())
                for each in others:
                    self._pairs.get(each, set()).discard((mark, rank))
            for other_mark, other_rank in others:
                if (other := self._offices.get(other_mark)) is not None:
                    _send(other, other_rank, Parcel(Mail(mark, rank, why_lost=why)))


@functools.cache
def own_mail() -> Mailroom:
    """Return the mail of this process's meshes."""
    return Mailroom()


def _why_not(office: Office, rank: int) -> str:
    """Return why a rank of a mesh cannot have mail now; "" if it can."""
    if office.core.state != "ready":
        return f"of {office.name} cannot be called: the mesh is {office.core.state}"
    if rank >= office.num_ranks:
        return f"of {office.name} was removed by a resize"
    died = office.core.dead.get(rank)
    return "" if died is None else f"of {office.name} {died.reason}"


def _send(office: Office, rank: int, parcel: Parcel[Mail]) -> None:
    frames = encode([parcel])
    order = Parcel(Relay((rank,), "control", -1, len(frames)), tuple(frames))
    office.runs.post_if_open(lambda core, now: [Send(order)])
