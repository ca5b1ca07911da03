"""A host that may join a mesh: its agent runs and gets files, and has no part in the mesh yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ....wire.attach import Detached, Refused
from ....wire.code_files import FilesAnswer
from ....wire.codec import Parcel
from ....wire.hosts import AgentAddress
from ....wire.messages import Stopped


@dataclass(eq=False)
class Candidate:
    """The agent of a host that may join.

    Attributes:
        agent: where it is.
        said: its messages, which are handled once the host has joined.
        ending: why the host cannot join; "" while it can.
    """

    agent: AgentAddress
    said: list[Parcel[Any]] = field(default_factory=list)
    ending: str = ""

    def hear(
        self, parcels: Iterable[Parcel[Any]], lost_at: float | None, lease_s: float, now: float
    ) -> Iterator[FilesAnswer]:
        """Take note of the agent's messages, and yield its answers about files.

        Args:
            parcels: that have arrived.
            lost_at: since when there is no connection; None while there is one.
            lease_s: how long the host may be without.
            now: the time.
        """
        for parcel in parcels:
            if isinstance(parcel.verb, FilesAnswer):
                yield parcel.verb
            elif isinstance(parcel.verb, Stopped | Refused | Detached):
                self.ending = self.ending or f"its agent has ended: {parcel.verb.reason}"
            else:
                self.said.append(parcel)
        if lost_at is not None and now >= lost_at + lease_s:
            self.ending = self.ending or f"its agent is not heard for {lease_s:.0f} s"
