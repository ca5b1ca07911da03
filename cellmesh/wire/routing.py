"""Messages of calls between ranks that have no socket to each other, as these are on different
hosts: their agents and the notebook's process pass them on, unread.
"""

from __future__ import annotations

from typing import ClassVar

from .verbs import Verb

# Size of the largest one; larger ones would delay what else travels over the links.
MAX_ROUTED_BYTES = 16 << 20
# Why calls of a rank without actors are refused.
NO_ACTORS = "was replaced, and has no actors: mesh.spawn makes them again"


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
