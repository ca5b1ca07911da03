"""Limits on runs and bytes in flight between a notebook and its ranks (docs/architecture.md lists
the queues).
"""

from __future__ import annotations

from collections.abc import Collection

from .status import RankState

# Runs in flight in one mesh. A controller has 6 kB of each, an agent 1 kB.
MAX_RUNS = 10_000
# Arguments that wait for one rank, behind those of the run that the rank may be executing.
MAX_RUN_BYTES = 256 << 20
# Smaller arguments are not counted: `MAX_RUNS` of them fit.
COUNTED_BYTES = 16 << 10
# A segment counts as this at least, as it takes a descriptor.
SEGMENT_BYTES = 1 << 20
# Before this much is copied, it is asked how much memory is free, which takes a millisecond.
CHECKED_BYTES = 64 << 20
# Answers and widgets' messages that wait in an agent for a controller that is attached and does not
# read.
MAX_ANSWER_BYTES = 256 << 20
# What a rank waits in for so long is not about to end.
_WAIT_S = 2.0


def may_wait_for(state: RankState, ranks: Collection[int]) -> bool:
    """Whether a rank has waited long in a torch.distributed call in which one of these ranks may be
    missing.

    Where that is so, what these ranks would do next is let through, whatever the bounds say.
    """
    if not state.collective or state.waited_s < _WAIT_S:
        return False
    members = next((count.ranks for count in state.counts if count.name == state.group), ())
    return any(rank in members or not members for rank in ranks)
