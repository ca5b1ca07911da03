"""Puts what ranks of many hosts have recorded on the clock of the notebook's host. Pure.

Only monotonic clocks are compared. A profile has times of the system clock, which may be set at
any moment; its rank says how far that was ahead of the monotonic one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ...wire.trace import Past, RankProfile
from ..core.clocks import ClockOffset


def past_on_our_clock(past: Past, clock: ClockOffset) -> Past:
    """Return a rank's record with times by the clock of the notebook's host."""
    ahead_s, told = clock.offset_s, past.operations

    def shifted(column: array[float]) -> array[float]:
        return array("d", [at_s - ahead_s for at_s in column])

    return replace(
        past,
        cells=tuple(
            replace(
                cell,
                begin_s=cell.begin_s - ahead_s,
                end_s=None if cell.end_s is None else cell.end_s - ahead_s,
            )
            for cell in past.cells
        ),
        operations=replace(
            told,
            begin_s=shifted(told.begin_s),
            end_s=shifted(told.end_s),
            wait_s=shifted(told.wait_s),
        ),
        since_s=past.since_s - ahead_s,
        now_s=past.now_s - ahead_s,
    )


def epoch_offsets(
    profiles: Mapping[int, RankProfile], clocks: Mapping[int, ClockOffset], epoch_ns: int
) -> dict[int, ClockOffset]:
    """Return the offsets of hosts' system clocks, from those of their monotonic clocks.

    Args:
        profiles: of ranks.
        clocks: rank -> the offset of its host's monotonic clock.
        epoch_ns: what this host's system clock is ahead of its monotonic one.
    """
    return {
        rank: replace(clock, offset_s=clock.offset_s + (profiles[rank].epoch_ns - epoch_ns) / 1e9)
        for rank, clock in clocks.items()
    }


def profile_on_our_clock(profile: RankProfile, clock: ClockOffset) -> RankProfile:
    """Return a rank's profile with times by the clock of the notebook's host, except for the times
    in its Chrome trace.
    """
    ahead_ns = round(clock.offset_s * 1e9)
    return msgspec.structs.replace(
        profile,
        start_ns=profile.start_ns - ahead_ns,
        end_ns=profile.end_ns - ahead_ns,
        collectives=tuple(
            msgspec.structs.replace(each, start_ns=each.start_ns - ahead_ns)
            for each in profile.collectives
        ),
        busy=tuple((begin_ns - ahead_ns, length_ns) for begin_ns, length_ns in profile.busy),
    )
