"""The work of one run, before it is sent: made once, and passed from feature to session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..wire.codec import Frame, Parcel, encode
from ..wire.messages import Channel, Relay, Work, WorkVerb
from ..wire.segments import SegmentFrame


class WorkItem(msgspec.Struct, frozen=True):
    """The work of one run: what ranks are to do, which ranks, and how the run is called.

    Attributes:
        verb: what each rank does; its `run` is set when the run has its number.
        kind: the class of the verb or, of a feature's request, that of the request: its class
            attributes say what the work is (`WorkVerb`).
        ranks: the ranks that do it.
        buffers: the frames that the verb's payload announces.
        title: what errors call the run.
        channel: ``control`` for what a rank answers beside the run that it executes.
        num_bytes: how long the arguments are.
        is_single: the run's result is the value of the one rank, not `Results`.
    """

    verb: Work
    kind: type[WorkVerb]
    ranks: tuple[int, ...]
    buffers: Sequence[Frame] = ()
    title: str = "the call"
    channel: Channel = "work"
    num_bytes: int = 0
    is_single: bool = False

    def relay(self, run: int) -> Parcel[Relay]:
        """Return the message that has the agent pass the work to its ranks, as this run."""
        verb: Any = msgspec.structs.replace(self.verb, run=run)
        frames = encode([Parcel(verb, tuple(self.buffers))])
        execution_count = verb.execution_count if self.kind.is_cell else 0
        lends = isinstance(frames[-1], SegmentFrame)
        relay = Relay(
            self.ranks,
            self.channel,
            run,
            len(frames),
            self.title,
            execution_count,
            self.kind.fills,
            lends,
        )
        return Parcel(relay, tuple(frames))
