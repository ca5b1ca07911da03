"""Opens the segments in which ranks return large values."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import CellmeshError
from ...wire.codec import Parcel
from ...wire.messages import Done, Pickled, Ranked
from ...wire.payload import stand_in
from ...wire.segments import map_private, open_segment

# A value whose descriptor has this number is kept without one.
MANY_DESCRIPTORS = 512


def open_value(parcel: Parcel[Any]) -> Parcel[Any]:
    """Open the segment of a returned value; the agent keeps the segment open until this message is
    acknowledged.

    Where many values are held already, and with each a descriptor, of which a process may have
    1024, it is mapped and closed.

    Args:
        parcel: as it came from the agent.
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
        *buffers, last = mapped = map_private(frame)
        plain = (
            Pickled(value.stream, len(mapped))
            if value.stream
            else Pickled(bytes(last), len(buffers))
        )
        answer = msgspec.structs.replace(said.verb, payload=plain)
        return Parcel(Ranked(said.ranks, answer), mapped if value.stream else tuple(buffers))
    except CellmeshError as error:
        lost = msgspec.structs.replace(said.verb, payload=stand_in(str(error)))
        return Parcel(Ranked(said.ranks, lost))
