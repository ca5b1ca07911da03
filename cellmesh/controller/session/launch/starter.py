"""The Protocol of what starts agents on hosts for `HostAgents`: commands of the notebook's, or
people and engines that hosts announce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....errors import HostError
from ....wire.hosts import Announcement, HostPart
from ....wire.ticket import Ticket


class Starter(Protocol):
    """Starts agents on hosts, and gives them orders until it lets them go."""

    def start(
        self,
        ticket: Ticket,
        parts: Sequence[HostPart],
        timeout_s: float,
        failures: dict[int, HostError] | None = None,
    ) -> list[Announcement]:
        """Start the agents of some hosts at once, and wait for what they announce.

        Args:
            ticket: the controllers'; agents get one of their own each.
            parts: what the agents run.
            timeout_s: how long all of them may take.
            failures: gets the error of each agent that could not be started, by its place among
                the parts, and the others go on; None if all are needed.

        Returns:
            The announcements of those that were started, in the order of the parts.

        Raises:
            HostError: one could not be started, and all are needed; or none can be.
        """
        ...

    def drop(self, index: int) -> None:
        """End one of the agents that were started last: those after it move up by a place."""
        ...

    def let_go(self) -> None:
        """Have agents go on, whatever becomes of this process or of what started them."""
        ...

    def end(self) -> None:
        """End the agents that were started and not let go."""
        ...

    def poll(self) -> bool:
        """Whether anything runs by which agents were started; it does as long as they."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of what `poll` asks for; False if it has not ended in time."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to what `poll` asks for."""
        ...

    def leave(self) -> None:
        """Close what this process has open for agents that have been let go."""
        ...
