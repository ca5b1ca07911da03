"""The controller that holds a mesh, as the mesh's agent writes it to a file beside the ticket."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from ..errors import HostError
from .own_file import read_own_file, write_whole
from .ticket import Ticket


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The controller that holds a mesh, as written to a file by the agent.

    Attributes:
        controller_pid: the process of the controller that is attached, or was last.
        is_attached: whether it is.
        since: when it attached or left, in seconds since the epoch.
        host: the controller's.
        notebook: the controller's, as of `Ticket`.
        num_refused: how many peers the agent has refused since it began, as they had no key.
        refused_at: when it refused the last of them, in seconds since the epoch.
    """

    controller_pid: int
    is_attached: bool
    since: float
    host: str = ""
    notebook: str = ""
    num_refused: int = 0
    refused_at: float = 0.0


def write_holder(ticket: Ticket, holder: Holder) -> None:
    """Write the file that names a mesh's controller.

    Raises:
        HostError: it cannot be written.
    """
    write_whole(ticket.holder_path, holder)


def read_holder(ticket: Ticket) -> Holder | None:
    """Read which controller holds a mesh; None if the agent has not written it yet."""
    try:
        return msgspec.json.decode(read_own_file(ticket.holder_path), type=Holder)
    except (HostError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def add_refused(ticket: Ticket, number: int) -> None:
    """Raise the count of peers that the notebook's process has refused, in the file that `cellmesh
    ps` reads; leave the file as it is if the disk is full.

    Args:
        ticket: of a mesh on many hosts.
        number: how many more were refused.
    """
    holder = read_holder(ticket) or Holder(
        controller_pid=os.getpid(), is_attached=True, since=time.time()
    )
    num_refused = holder.num_refused + number
    with contextlib.suppress(HostError):
        write_holder(
            ticket,
            msgspec.structs.replace(holder, num_refused=num_refused, refused_at=time.time()),
        )
