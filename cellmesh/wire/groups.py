"""Messages that make and rebuild ranks' process groups, also over the ranks of two meshes (links),
and counts of operations on each.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from .ranks import describe_ranks
from .verbs import FeatureRequest, Verb, WorkVerb


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a rank has begun on a group.

    Attributes:
        number: number of the collective among the group's collectives on that rank, from 1.
        name: name of the function in ``torch.distributed``.
        num_elements: size of the tensor whose size must be equal on all ranks; -1 without one.
        dtype: dtype of that tensor; "" without one.
        root: global rank that all others send to or receive from; -1 without a root.
    """

    number: int
    name: str
    num_elements: int = -1
    dtype: str = ""
    root: int = -1

    def describe(self) -> str:
        """Return the collective's kind, size and root, as ``all_reduce of 8 float32``."""
        size = "" if self.num_elements < 0 else f"{self.num_elements:,} "
        root = f" with rank {self.root} as its root" if self.root >= 0 else ""
        return f"{self.name} of {size}{self.dtype}{root}" if self.dtype else f"{self.name}{root}"


class InFlight(msgspec.Struct, frozen=True, array_like=True):
    """An operation that a rank has begun and that has not ended.

    Attributes:
        group: torch's name of the process group.
        name: name of the function in ``torch.distributed``.
        number: number of the operation among the group's collectives on that rank, or among the
            rank's messages to or from `peer`.
        peer: global rank of a message's other side; -1 for a collective or a receive from any rank.
    """

    group: str
    name: str
    number: int
    peer: int = -1
    gives_up: bool = False  # whether the group's own time-out ends it soon


class GroupCount(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of operations that a rank began on a process group since it was made or healed."""

    name: str  # torch's name of the group
    ranks: tuple[int, ...]  # its members; () for all ranks
    num_collectives: int
    # Messages, as (peer's global rank, number), peers ascending.
    num_sent: tuple[tuple[int, int], ...] = ()
    num_received: tuple[tuple[int, int], ...] = ()
    description: str = ""  # torch's ``group_desc``, as far as it was asked for, like `recent`
    recent: tuple[Begun, ...] = ()  # its last collectives, ascending


class SetMesh(WorkVerb, frozen=True):
    """Ask ranks to build a torch DeviceMesh of these dims and bind it to ``mesh``; a collective."""

    run: int
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]


class Heal(WorkVerb, frozen=True):
    """Ask `ranks` to rebuild, in place, each process group whose members are all among them; a
    collective of these ranks.

    A rank does this before work that it holds back. `generation` has not been used before in this
    mesh. A rank without groups (a `Respawn`) first makes the groups of `blueprint` (`Blueprint`);
    with an empty one it makes the mesh's own, of these dims. The c10d store listens on `store_port`
    (0: as before) of `store_address` ("": as before). `num_resizes` is the number of resizes of the
    mesh so far, and `layout` the number of ranks of each host: a rank whose groups are of an
    earlier size drops them, and makes the mesh's own. `keeps_groups`: the groups are kept, and only
    models that an interrupted step has half updated are reset.
    """

    run: int
    generation: int
    ranks: tuple[int, ...]
    blueprint: bytes
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    store_port: int = 0
    store_address: str = ""
    num_resizes: int = 0
    layout: tuple[int, ...] = ()
    keeps_groups: bool = False


class Describe(Verb, frozen=True):
    """Ask a rank for the data from which a new rank makes the same process groups (`Blueprint`)."""

    request: int


class Blueprint(Verb, frozen=True):
    """A rank's answer to `Describe`: data from which another rank makes the same process groups."""

    request: int
    data: bytes


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


LinkRequest = FindStore | SetLink


def label_of(description: str, ranks: tuple[int, ...]) -> str:
    """Return the name of a process group for users: a mesh dim, the default group, or its ranks.

    Args:
        description: torch's ``group_desc``.
        ranks: ranks of the group's members; () for all.
    """
    if description == "default_pg":
        return "the default group"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    if description not in ("", "undefined"):
        return description
    return f"the group of {describe_ranks(ranks)}" if ranks else "the default group"
