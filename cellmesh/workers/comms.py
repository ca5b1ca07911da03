"""Comms (widgets) that user code opens on a rank, carried to the notebook's front end and back."""

from __future__ import annotations

from ..wire.framing import Frame
from ..wire.messages import FromFrontEnd


class Comms:
    """The comms that are open on this rank."""

    def receive(self, verb: FromFrontEnd, buffers: tuple[Frame, ...]) -> None:
        """A message of the front end's; on the main thread."""
        raise NotImplementedError
