"""The shared-memory segments in which the controller sends large values to ranks, and receives
theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import CellmeshError, MeshUsageError
from ...wire import limits, segments
from ...wire.codec import Frame, Parcel
from ...wire.messages import Done, Pickled, Ranked
from ...wire.segment_pool import SegmentPool
from ...wire.segments import format_bytes, inlined, open_segment

# A returned value's segment is mapped and closed if its descriptor has this number or a higher one.
MANY_DESCRIPTORS = 512


def open_value(parcel: Parcel[Any]) -> Parcel[Any]:
    """Open the segment that holds a returned value; the agent keeps the segment open until this
    message is acknowledged.

    Each open segment has a file descriptor, of which a process may have 1024. If many are open, the
    segment is mapped and its descriptor closed.

    Args:
        parcel: message from the agent.
    """
    said = parcel.verb
    if type(said) is not Ranked or type(said.verb) is not Done:
        return parcel
    value = said.verb.payload
    if value is None or not value.is_mapped:
        return parcel
    try:
        frame = open_segment(parcel.buffers[0])
        if frame.memfd.descriptor < MANY_DESCRIPTORS:
            return Parcel(said, (frame,))
        plain, buffers = inlined(value, frame)
        answer = msgspec.structs.replace(said.verb, payload=plain)
        return Parcel(Ranked(said.ranks, answer), tuple(buffers))
    except CellmeshError as error:
        from ...wire.payload import stand_in

        lost = msgspec.structs.replace(said.verb, payload=stand_in(str(error)))
        return Parcel(Ranked(said.ranks, lost))


def lend(
    pool: SegmentPool, pickled: Pickled, buffers: Sequence[Frame]
) -> tuple[Pickled, list[Frame]]:
    """Write a pickle's buffers into a segment, if they are large.

    Args:
        pool: the controller's segments.
        pickled, buffers: as `payload.dumps` returns them.

    Returns:
        The pickle and the frames to send; hold these until no rank can need the segment any more.

    Raises:
        MeshUsageError: there is not enough memory, or the limit on file size is lower; nothing has
            been sent.
    """
    num_bytes = segments.num_bytes_of(pickled, buffers)
    if num_bytes < segments.MIN_BYTES or not segments.are_possible():
        return pickled, list(buffers)
    mapped, parts = segments.fold_in(pickled, buffers)
    sizes = [len(part) for part in parts]
    try:
        segment = pool.take(segments.span(sizes))
        if segment.is_new:
            limits.check_fits(segment.num_bytes)
        segment.fill(parts)
        return mapped, [pool.lend(segment, segments.new_loan(), sizes)]
    except OSError as e:
        raise MeshUsageError(
            f"{format_bytes(num_bytes)} cannot be put where ranks could map it: {e.strerror} "
            "(`ulimit -f` shows the limit of files). Nothing has been sent"
        ) from e
