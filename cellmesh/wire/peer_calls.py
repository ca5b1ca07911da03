"""Calls of other ranks that a rank executes, for the controller, which has not sent them."""

from __future__ import annotations

from .verbs import Verb

# Numbers of runs on a rank that are calls of other ranks: above those of the notebook, and below
# those of heals.
PEER_RUNS = range(1 << 39, 1 << 40)


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
