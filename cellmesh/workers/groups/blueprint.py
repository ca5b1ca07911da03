"""Describes a rank's process groups, for a rank that replaces a dead one and for healing."""

from __future__ import annotations

import msgspec

# What a rank knows of the setup of its models with one signature, in an order that is the same on
# all ranks.
Progress = tuple[tuple[int, ...], ...]


class GroupPlan(msgspec.Struct, frozen=True):
    """The arguments with which a process group was made.

    Attributes:
        name: torch's name of it.
        ranks: the mesh's ranks of its members, in the group's order; () for the mesh's default
            group.
        backend: backend string.
        tag: "" for none.
        description: torch's description.
        timeout_s: of its collectives.
        device: the device bound to it, "" for none.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    tag: str
    description: str
    timeout_s: float
    device: str = ""

    def members(self, world_size: int) -> tuple[int, ...]:
        """Global ranks of the group's members."""
        return self.ranks or tuple(range(world_size))


class MeshPlan(msgspec.Struct, frozen=True):
    """A DeviceMesh over all ranks.

    Attributes:
        names: its dims.
        shape: their sizes.
        first_group: torch's counter of groups when it was made: where its groups' names begin.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    first_group: int


class BlueprintData(msgspec.Struct, frozen=True):
    """All that a new rank needs to make the groups of a living one.

    Attributes:
        groups: in the order made; those that the writer is no member of, too.
        group_count: torch's counter of groups.
        mesh: the rank's ``mesh``.
    """

    groups: tuple[GroupPlan, ...]
    group_count: int
    mesh: MeshPlan | None = None


class Presence(msgspec.Struct, frozen=True):
    """The state that a rank reports at the start of a heal.

    Attributes:
        groups: those it is a member of.
        group_count: torch's counter of the mesh's groups.
        half_done: the models that an interrupted step has left half done, by signature.
        progress: how far the models have got in what is done once, or counted, by signature.
        uses_meshs: whether the mesh's groups are in use, and not set aside.
        program: torch's counter of the groups of a program, by the name of its default group.
        lack: why it cannot connect its groups; "" if it can.
    """

    groups: tuple[GroupPlan, ...]
    group_count: int
    half_done: tuple[str, ...]
    progress: dict[str, Progress]
    uses_meshs: bool = True
    program: dict[str, int] = {}
    lack: str = ""
