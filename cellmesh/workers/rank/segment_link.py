"""A rank's large values: sends results to the agent in segments, and reports segments that are no
longer used.

The socket carries one packet a piece of news, and each is sent by one system call, without a lock:
memory is freed on any thread and between any two instructions, also by the garbage collector in the
middle of a send.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence

from ...stdlib import os
from ...wire import files, segments
from ...wire.codec import Frame, Parcel, encode
from ...wire.messages import Pickled
from ...wire.values import Freed, Mapped

# Of the socket, whose size bounds what a rank gives while the agent does not read: some values.
# News of segments that are used no more is small, and there is room for that of all segments of a
# controller.
_BUFFER_BYTES, _GIVEN_BYTES = 32 << 10, 7 << 10


class SegmentLink:
    """A rank's connection to the agent for segments.

    Args:
        connection: a ``SOCK_SEQPACKET`` to the agent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._num_forks = 0
        # Before and after: another thread may map a segment in between.
        os.register_at_fork(before=self._note_fork, after_in_parent=self._note_fork)
        files.mapped.listener = self._tell_mapped

    def give(
        self, run: int, pickled: Pickled, buffers: Sequence[Frame]
    ) -> tuple[Pickled, list[Frame]]:
        """Write a pickle's buffers into a segment, if they are large, and pass it to the agent.

        Args:
            run: whose value it is; the agent forgets it where the run fails after all.
            pickled, buffers: as `payload.dumps` gives them.

        Returns:
            What to send.
        """
        if (
            segments.num_bytes_of(pickled, buffers) < segments.MIN_BYTES
            or not segments.are_possible()
        ):
            return pickled, list(buffers)
        mapped, parts = segments.fold_in(pickled, buffers)
        sizes = [len(part) for part in parts]
        loan = segments.new_loan()
        try:
            memfd = segments.create(segments.span(sizes), "cellmesh-result")
            segments.write(memfd, parts)
            frame = segments.SegmentFrame.of(memfd, loan, sizes)
            token = run.to_bytes(_GIVEN_BYTES, "little", signed=True)
            socket.send_fds(self._connection, [token], [memfd.descriptor])
        except OSError:  # user code has closed the socket, or has set limits
            return pickled, list(buffers)
        return mapped, [bytes(frame)]

    def hold(self, loan: int) -> Callable[[], object]:
        """See `payload.Holder`."""
        (freed,), (shared,) = (
            encode([Parcel(Freed(loan, is_shared))]) for is_shared in (False, True)
        )
        return functools.partial(self._tell_freed, freed, shared, self._num_forks)

    def _tell_freed(self, freed: Frame, shared: Frame, num_forks: int) -> None:
        news = freed if num_forks == self._num_forks else shared
        try:
            self._connection.send(news, socket.MSG_DONTWAIT)
        except OSError:  # the segment is not used again then
            return

    def _tell_mapped(self, path: str, num_bytes: int) -> None:
        with contextlib.suppress(OSError, UnicodeEncodeError):
            self._connection.send(encode([Parcel(Mapped(path, num_bytes))])[0])

    def _note_fork(self) -> None:
        self._num_forks += 1
