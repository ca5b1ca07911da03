"""Requests that connect ranks of two meshes by a process group."""

from __future__ import annotations

from typing import ClassVar, Literal

from .verbs import FeatureRequest

# "open": it is connected once all ranks are there. "failed": as "open", and operations that wait
# for that raise. "dropped": there is no such link any more.
LinkState = Literal["open", "failed", "dropped"]


class FindStore(FeatureRequest, frozen=True):
    """Ask a rank for the address of its mesh's c10d store."""

    handler: ClassVar[str] = "links"
    is_query: ClassVar[bool] = True


class SetLink(FeatureRequest, frozen=True):
    """Give a rank the state of a link: beside its work, to end operations on an earlier connection;
    in the order of its work, to connect the link as well.

    Attributes:
        name: the link's name.
        number: number of the connection, which no other link has; one that is lower than the
            rank's is ignored.
        state: state of the link.
        reason: why there is another state.
        lack: why the ranks cannot be connected now; "" if they can.
        first: the link's rank of the mesh's rank 0.
        size: number of ranks of both meshes.
        address, port: the c10d store through which the ranks meet.
        backend: backend string of the process group.
        patience_s: how long to wait for ranks to connect, in seconds.
    """

    handler: ClassVar[str] = "links"
    is_query: ClassVar[bool] = True
    needs_room: ClassVar[bool] = False

    name: str
    number: int
    state: LinkState
    reason: str
    lack: str = ""
    first: int = 0
    size: int = 0
    address: str = ""
    port: int = 0
    backend: str = ""
    patience_s: float = 0.0


AnyRequest = FindStore | SetLink
