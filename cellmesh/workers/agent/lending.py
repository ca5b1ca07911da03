"""Segments on their way to or from ranks: the agent opens each, so that none is lost when its
writer dies.

What a controller lends to ranks stays open until the run has ended on all of them; what a rank
gives to the controller until that has acknowledged the message, as the frame is kept until then.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from ...errors import CellmeshError
from ...wire.codec import Frame, Parcel
from ...wire.messages import Done, Failed, Relay
from ...wire.payload import stand_in
from ...wire.segments import SegmentFrame, open_segment, read_ref
from .rank_link import RankLink


class Lending:
    """The segments that one agent keeps open.

    Attributes:
        lent: run -> the segment that it took along, and the ranks that have not ended it.
    """

    def __init__(self) -> None:
        self.lent: dict[int, tuple[SegmentFrame, set[int]]] = {}

    def lend(
        self, order: Relay, frames: Sequence[Frame], living: Container[int]
    ) -> tuple[Frame, ...]:
        """Open the segment that a piece of work refers to.

        Args:
            order: the controller's.
            frames: the work; its last frame names the segment.
            living: the ranks that have a process.

        Returns:
            The work, with a frame that names the segment as it is open here; as it was where the
            controller has ended: the ranks will say so.
        """
        try:
            frame = open_segment(frames[-1])
        except CellmeshError:
            return tuple(frames)
        ranks = {rank for rank in order.ranks if rank in living}
        if ranks:
            self.lent[order.run] = frame, ranks
        return (*frames[:-1], frame)

    def note(self, rank: int, parcel: Parcel[Any], link: RankLink | None) -> Parcel[Any]:
        """Note a message of a rank, which may end a run or have a value in a segment.

        Args:
            rank: which.
            parcel: what it said.
            link: the connection to it; None if it has ended.

        Returns:
            What it said; a value's frame names the segment as it is open here.
        """
        verb = parcel.verb
        if type(verb) not in (Done, Failed):
            return parcel
        self._end(verb.run, rank)
        is_mapped = verb.payload is not None and verb.payload.is_mapped
        if not is_mapped and type(verb) is Done:
            return parcel
        # Of a run that has failed, too: it may have been interrupted once its value was given.
        memfd = link.take_given(verb.run) if link is not None else None
        if not is_mapped:
            return parcel
        try:
            ref = read_ref(parcel.buffers[0])
            if memfd is not None:
                return Parcel(verb, (SegmentFrame.of(memfd, ref.loan, ref.sizes),))
        except CellmeshError:
            pass
        lost = stand_in("the value has not arrived: ask for it again (mesh.pull)")
        return Parcel(msgspec.structs.replace(verb, payload=lost))

    def forget(self, rank: int) -> None:
        """Release the segments of a rank whose process has ended."""
        for run in list(self.lent):
            self._end(run, rank)

    def _end(self, run: int, rank: int) -> None:
        if run in self.lent:
            self.lent[run][1].discard(rank)
            if not self.lent[run][1]:
                del self.lent[run]
