"""Messages that make and heal ranks' process groups, and counts of operations on each."""

from __future__ import annotations

import msgspec

from .ranks import describe_ranks
from .verb import Verb, WorkVerb


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a rank has begun on a group.

    Attributes:
        number: of the group's collectives on that rank, from 1.
        name: as ``torch.distributed`` calls it.
        num_elements: of the tensor that has to be as large on every rank; -1 if there is none.
        dtype: of that tensor, "" if there is none.
        root: the mesh's rank that all others send to or receive from; -1 if there is none.
    """

    number: int
    name: str
    num_elements: int = -1
    dtype: str = ""
    root: int = -1


class InFlight(msgspec.Struct, frozen=True, array_like=True):
    """An operation that a rank has begun and that has not ended.

    Attributes:
        group: torch's name of the process group.
        name: as ``torch.distributed`` calls it.
        number: of the group's collectives on that rank, or of its messages to or from `peer`.
        peer: of a message, the mesh's rank; -1 of a collective, and of a receive from any rank.
    """

    group: str
    name: str
    number: int
    peer: int = -1
    gives_up: bool = False  # whether the group's own time-out ends it soon


class GroupCount(msgspec.Struct, frozen=True, array_like=True):
    """Number of operations that a rank began on a process group since it was made or healed."""

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
    """Ask ranks to rebuild, in place, each process group whose members are all among `ranks`; a
    collective of these.

    A rank does this before work that it holds back. `generation` has not been used before in this
    mesh. A rank without groups (a `Respawn`) first makes those of `blueprint` (`Blueprint`); with
    an empty one it makes the mesh's own, of these dims. `store_port` is where the c10d store
    listens now (0: as before), at `store_address` ("": as before). `num_resizes` is how often the
    mesh has got another number of ranks, and `layout` how many ranks each host has: a rank whose
    groups are of an earlier size drops them, and makes the mesh's own. `keeps_groups`: the groups
    stand, and only models that an unfinished step has left half done are reset.
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
    """A rank's answer to `Describe`: data, read by ranks only, to make its groups again."""

    request: int
    data: bytes


def label_of(description: str, ranks: tuple[int, ...]) -> str:
    """Return what users call a process group: a mesh dim, the default group, or its ranks.

    Args:
        description: torch's ``group_desc``.
        ranks: the group's members, () for all.
    """
    if description == "default_pg":
        return "the default group"
    if description.startswith("mesh_"):
        return description.removeprefix("mesh_")
    if description not in ("", "undefined"):
        return description
    return f"the group of {describe_ranks(ranks)}" if ranks else "the default group"
