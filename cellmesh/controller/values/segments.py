"""The shared-memory segments in which the controller receives large values."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import CellmeshError
from ...wire.codec import Parcel
from ...wire.messages import Done, Ranked
from ...wire.segments import inlined, open_segment

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
