"""The Protocols of launchers, which start a mesh's agents and know what runs of them here, and of
starters, by which a launcher starts agents on hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ....errors import HostError
from ....wire.hosts import AgentAddress, Announcement, HostPart
from ....wire.ticket import Ticket
from ...host_list import HostEntry


class Launcher(Protocol):
    """Starts the agents of a mesh, one a host, and watches and signals what runs of them here.

    Attributes:
        ticket: the mesh's, with the addresses of its agents as they are now.
        unheard: the places of the agents that were started by another process, and not reached.
    """

    ticket: Ticket
    unheard: tuple[int, ...] = ()

    def start(self) -> int:
        """Start the agent.

        Returns:
            A descriptor that can be read once the agent has ended; the caller closes it.

        Raises:
            HostError: the agent could not be started.
        """
        ...

    def poll(self) -> bool:
        """Whether the agent runs."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the agent's end, and for that of what started it.

        Args:
            timeout_s: how long, in seconds; None for as long as it takes.

        Returns:
            Whether the agent has ended.
        """
        ...

    def signal(self, number: int) -> None:
        """Send the agent a signal, unless it has ended."""
        ...

    def let_go(self) -> None:
        """Have the agent go on, whatever becomes of this process: the mesh is ready."""
        ...

    def leave(self) -> None:
        """Close what this process has open for the agent, which goes on or has ended."""
        ...

    def describe(self) -> str:
        """Where the agent runs, and as which process."""
        ...

    def start_again(
        self, names: Mapping[int, str], given_up: Collection[int] = ()
    ) -> dict[int, HostError]:
        """Start agents in place of lost ones, all at once, and put the addresses of those that
        start into `ticket`. Blocks.

        Args:
            names: index of a lost host -> the host to start its agent on.
            given_up: the indices of lost hosts whose agents are ended even if they live.

        Returns:
            The errors of those that could not be started, by the index of the lost host.
        """
        return {}

    def check_may_join(self, names: Iterable[str]) -> None:
        """Check that hosts can join a mesh that was started so.

        Raises:
            MeshUsageError: there are some, and they cannot.
        """
        ...

    def start_more(self, layout: Sequence[int], entries: Sequence[HostEntry]) -> list[AgentAddress]:
        """Start agents on more hosts, and return where they are reached. Blocks.

        Args:
            layout: how many ranks each host has then.
            entries: the hosts that are new, the last of `layout`.

        Raises:
            HostError: one could not be started; those that were have been ended.
            MeshUsageError: no hosts can join, or one is in the mesh.
        """
        return []

    def forget(self, agents: Sequence[AgentAddress]) -> None:
        """Close what leads to agents that `start_more` has started and that have ended."""
        ...

    def note_resized(
        self, layout: Sequence[int], dims: Mapping[str, int], new: Sequence[AgentAddress]
    ) -> None:
        """Note the mesh's new number of ranks and its hosts.

        Raises:
            HostError: that cannot be written; nothing has changed.
        """
        ...


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
