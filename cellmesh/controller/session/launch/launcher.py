"""The Protocol of launchers, which start a mesh's agent on this machine or through a cluster's
engine.
"""

from __future__ import annotations

from typing import Protocol


class Launcher(Protocol):
    """Starts an agent's process, and watches and signals the process."""

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
