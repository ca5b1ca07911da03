"""Calls between ranks, for the processes that have not sent them: reports on those that last, for
the controller; and the way of messages between ranks that have no socket to each other, as these
are on different hosts: their agents and the notebook's process pass them on, unread.
"""

from __future__ import annotations

from typing import ClassVar

from .verbs import Verb

# Numbers of runs on a rank that are calls of other ranks: above those of the notebook, and below
# those of heals.
PEER_RUNS = range(1 << 39, 1 << 40)
# Why calls of a rank without actors are refused.
NO_ACTORS = "was replaced, and has no actors: mesh.spawn makes them again"


class PeerWork(Verb, frozen=True):
    """Report of a rank that it executes a call of another mesh's rank, or of its own mesh's, for
    long; a `Done` or `Failed` without a value follows at its end.

    Attributes:
        run: number of the call, the same on all ranks that it was sent to.
        title: the method and its caller.
        ranks: the ranks that it was sent to.
        age_s: for how long the rank has executed it, in seconds.
        is_cancelled: whether its caller no longer waits for it: the controller stops it, on all of
            its ranks before the same operation.
    """

    run: int
    title: str
    ranks: tuple[int, ...]
    age_s: float = 0.0
    is_cancelled: bool = False


class Routed(Verb, frozen=True):
    """A message (of `wire/handles.py`) from one rank to another, or the news that none can be sent.

    Attributes:
        mark: mesh (as in `Address`) of the receiver, on the way up; of the sender, on the way down.
            "" for all ranks with which the receiver has exchanged messages.
        rank: number of that rank.
        num_buffers: number of frames of the message, which follow.
        why_lost: why the receiver cannot be reached, or the sender any more; "" if it can.
    """

    run: ClassVar[int] = -1

    mark: str
    rank: int
    num_buffers: int = 0
    why_lost: str = ""
