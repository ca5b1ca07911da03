"""The file in which an agent says who holds its mesh, and how many peers it has refused; `cellmesh
ps` reads it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from ...errors import HostError
from ...wire.attach import Hello
from ...wire.ticket import Holder, Ticket, write_holder

# How often the count of refused peers is written, at most.
_COUNT_S = 1.0


class HolderFile:
    """A mesh's `Holder`, in memory and in its file.

    Args:
        ticket: the mesh's.

    Attributes:
        holder: what the file says, or is about to say.
        write_at: when to call `write`, on the monotonic clock; None if the file is up to date.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.holder = Holder(
            controller_pid=ticket.controller_pid,
            is_attached=True,
            since=ticket.created_at,
            notebook=ticket.notebook,
        )
        self.write_at: float | None = None

    def attach(self, hello: Hello) -> None:
        """Note which controller has attached, and write the file."""
        self._note(
            controller_pid=hello.pid, host=hello.host, notebook=hello.notebook, is_attached=True
        )

    def leave(self) -> None:
        """Note that the controller has left, and write the file."""
        self._note(is_attached=False)

    def _note(self, **changes: Any) -> None:
        self.holder = msgspec.structs.replace(self.holder, since=time.time(), **changes)
        self.write()

    def count(self, num_refused: int) -> None:
        """Note how many peers the agent has refused; the file is written soon."""
        if num_refused > self.holder.num_refused and self.write_at is None:
            self.write_at = time.monotonic() + _COUNT_S
        if num_refused != self.holder.num_refused:
            self.holder = msgspec.structs.replace(
                self.holder, num_refused=num_refused, refused_at=time.time()
            )

    def write(self) -> None:
        """Write the file."""
        self.write_at = None
        with contextlib.suppress(HostError):  # the disk is full; who is attached is not troubled
            write_holder(self._ticket, self.holder)
