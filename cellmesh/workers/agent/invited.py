"""A host's side of the rendezvous: announces the host, and gets the ticket of its agent."""

from __future__ import annotations

import os
import sys
import time

import msgspec
import zmq

from ...errors import HostError
from ...wire import transport
from ...wire.descriptors import wait_readable
from ...wire.hosts import Announcement
from ...wire.rendezvous import (
    AGAIN_S,
    ARRIVED,
    ORDER,
    REFUSED,
    SAID,
    TICKET,
    HostFacts,
    Invitation,
)

# A notebook that does not answer for so long is said to be missing, once in as long.
_SILENT_S = 10.0
_LINGER_MS = 500


class Visit:
    """A connection from a host to the listener in the notebook, by which the host joins a mesh.

    Args:
        invitation: says where it is.
        facts: of this host.
    """

    def __init__(self, invitation: Invitation, facts: HostFacts) -> None:
        self._invitation = invitation
        self._facts = msgspec.json.encode(facts)
        self._context: zmq.Context[transport.Socket] = zmq.Context()
        self._socket, self._monitor = transport.connect_dealer(
            self._context,
            invitation.endpoint,
            b"H" + os.urandom(16),
            (invitation.secret, invitation.public_key),
        )
        self._is_connected = False

    def receive_ticket(self, patience_s: float | None = None) -> bytes | None:
        """Wait until the notebook sends the ticket of this host's agent.

        Args:
            patience_s: how long to wait for the listener; None for as long as it takes.

        Returns:
            The ticket; None if there is no listener.

        Raises:
            HostError: this host is not wanted.
        """
        began = said_at = time.monotonic()
        while (found := self._next()) is None or found[0] != TICKET:
            now = time.monotonic()
            if not self._is_connected and now - said_at > _SILENT_S:
                said_at = now
                _print(
                    f"{self._invitation.endpoint} does not answer: does the notebook run, and may "
                    "this host connect to it? Waiting for it"
                )
            if not self._is_connected and patience_s is not None and now - began > patience_s:
                return None
        return found[1]

    def say(self, announcement: Announcement) -> None:
        """Send the notebook the agent's announcement."""
        self._send(SAID, msgspec.json.encode(announcement))

    def hear(self, agent: int) -> bytes:
        """Wait for an order of the notebook; b"" if the notebook has gone, or the agent has ended.

        Args:
            agent: a descriptor that is readable once the agent has ended.
        """
        while True:
            try:
                found = self._next(agent)
            except HostError as error:
                _print(str(error))
                return b""
            if found is not None and found[0] == ORDER:
                return found[1]
            if (found is None and wait_readable([agent], 0)) or not self._is_connected:
                return b""

    def close(self) -> None:
        """Close the connection; the last message may take a moment to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _next(self, *watched: int) -> tuple[bytes, bytes] | None:
        """Return what the notebook has sent within a second, if anything; say that we wait."""
        self._hear_connection()
        if self._is_connected:
            self._send(ARRIVED, self._facts)
        if not transport.readable(self._socket):
            numbers = [int(each.getsockopt(zmq.FD)) for each in (self._socket, self._monitor)]
            wait_readable([*numbers, *watched], AGAIN_S)
            self._hear_connection()
            if not transport.readable(self._socket):
                return None
        word, text = map(bytes, transport.receive(self._socket))
        if word == REFUSED:
            raise HostError(text.decode(errors="replace"))
        return word, text

    def _hear_connection(self) -> None:
        for is_new in transport.hear_connection(self._monitor):
            if is_new:
                _print(f"announced to {self._invitation.endpoint}; waiting for the other hosts")
            self._is_connected = is_new

    def _send(self, word: bytes, text: bytes) -> None:
        transport.send(self._socket, [word, text])


def _print(text: str) -> None:
    print(f"cellmesh agent: {text}", file=sys.stderr, flush=True)
