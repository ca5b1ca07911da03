"""Messages that survive a broken connection: numbered, kept until acknowledged, sent again after a
reconnect.

Both ends have a `Reliable`, which outlives the connections between them. Every message travels
behind a preamble of 16 bytes: its own number, and the highest number received from the other side.
ZeroMQ delivers in order, and may lose messages in flight when a connection breaks; so a message
that is not the next one has been received before, or will be sent again. After a reconnect each
side sends, in a message without a number, the highest number that it has received, and sends again
the messages that the other side lacks.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import ProtocolError

# Time that an acknowledgement waits for a message that can carry it, in seconds.
ACK_S = 0.05
# An acknowledgement is due after so many bytes, which the other side keeps until then.
ACK_BYTES = 4 << 20

_PREAMBLE = struct.Struct("<QQ")
M = TypeVar("M")


class Reliable(Generic[M]):
    """One end of a connection whose messages are numbered and kept until acknowledged.

    Args:
        on_acked: called with each message that the other side has acknowledged.

    Attributes:
        num_received: number of messages received so far, without repetitions.
        kept_bytes: size of the messages that are not acknowledged, in bytes.
        ack_at: time when an acknowledgement is due, unless a message carries it before; None if
            none is due.
    """

    def __init__(self, on_acked: Callable[[M], object] | None = None) -> None:
        self.num_received = 0
        self.kept_bytes = 0
        self._on_acked = on_acked
        self._num_sent = 0
        self._kept: collections.deque[tuple[int, M, int]] = collections.deque()
        self.ack_at: float | None = None
        self._unacked_bytes = 0

    def wrap(self, message: M, num_bytes: int) -> bytes:
        """Number a message and keep it until it is acknowledged; return the preamble to send before
        it.
        """
        self._num_sent += 1
        self._kept.append((self._num_sent, message, num_bytes))
        self.kept_bytes += num_bytes
        return self._preamble(self._num_sent)

    def wrap_aside(self) -> bytes:
        """Return the preamble of a message that is not numbered and not sent again: a greeting or
        an acknowledgement.
        """
        return self._preamble(0)

    def unwrap(self, preamble: bytes, num_bytes: int, now: float) -> bool:
        """Record a received message by its preamble, and return whether the receiver is to handle
        it.

        Args:
            preamble: the message's preamble.
            num_bytes: size of the rest of the message, in bytes.
            now: current time of any clock, in seconds.

        Returns:
            Whether to handle the message; else it is a repetition, follows a gap, or has no number.

        Raises:
            ProtocolError: the preamble is invalid, or acknowledges a message that was never sent.
        """
        number, acked = read_preamble(preamble)
        if self._kept or acked > self._num_sent:
            self._note_acked(acked)
        if number != self.num_received + 1:
            if number and number <= self.num_received:
                self.ack_at = now  # the sender lacks the acknowledgement
            return False
        self.num_received = number
        if self.ack_at is None:
            self.ack_at = now + ACK_S
        self._unacked_bytes += num_bytes
        if self._unacked_bytes >= ACK_BYTES:
            self.ack_at = now
        return True

    def add_bytes(self, num_bytes: int, now: float) -> None:
        """Count the bytes of a shared segment as part of the message received last, so that it
        is acknowledged earlier.
        """
        self._unacked_bytes += num_bytes
        if self._unacked_bytes >= ACK_BYTES:
            self.ack_at = now

    def resume(self, num_received: int) -> list[tuple[bytes, M]]:
        """Return the messages, with preambles, to send again after a reconnect to a side that has
        received `num_received` messages.
        """
        self._note_acked(num_received)
        return [(self._preamble(number), message) for number, message, _ in self._kept]

    @staticmethod
    def is_aside(preamble: bytes) -> bool:
        """Return whether a preamble belongs to a message without a number (`wrap_aside`).

        Raises:
            ProtocolError: the preamble is invalid.
        """
        return read_preamble(preamble)[0] == 0

    def take_kept(self) -> list[M]:
        """Remove and return the messages that the other side has not acknowledged, oldest first."""
        kept = [message for _, message, _ in self._kept]
        self._kept.clear()
        self.kept_bytes = 0
        return kept

    def owes_ack(self, now: float) -> bool:
        """Return whether the received messages must be acknowledged now."""
        return self.ack_at is not None and now >= self.ack_at

    def _preamble(self, number: int) -> bytes:
        self.ack_at, self._unacked_bytes = None, 0
        return _PREAMBLE.pack(number, self.num_received)

    def _note_acked(self, acked: int) -> None:
        if acked > self._num_sent:
            raise ProtocolError(f"the other side has heard {acked} messages, of {self._num_sent}")
        kept = self._kept
        while kept and kept[0][0] <= acked:
            _, message, num_bytes = kept.popleft()
            self.kept_bytes -= num_bytes
            if self._on_acked is not None:
                self._on_acked(message)


def read_preamble(preamble: bytes) -> tuple[int, int]:
    """Read a preamble: the message's number (0: not numbered), and the highest number that its
    sender has received.

    Raises:
        ProtocolError: the preamble is invalid.
    """
    if len(preamble) != _PREAMBLE.size:
        raise ProtocolError(f"a preamble of {len(preamble)} bytes")
    number, acked = _PREAMBLE.unpack(preamble)
    return number, acked
