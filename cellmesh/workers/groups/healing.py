"""Exchanges the ranks' states during a heal, in which ranks reconnect their process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from ...errors import GroupDown
from ...wire.ranks import describe_ranks
from .group_factory import GroupPlan
from .model_reset import Progress, Survey
from .store import InterruptibleStore, MeshStore

# How long ranks wait for each other.
_PATIENCE = timedelta(seconds=60)


class StateAtHeal(msgspec.Struct, frozen=True):
    """The state (groups, models, counters) that a rank sends to others at the start of a heal."""

    groups: tuple[GroupPlan, ...]  # groups of which it is a member
    group_count: int  # torch's counter of groups, in the mesh's registries
    # Signatures of models that an interrupted step has left half done.
    half_done: tuple[str, ...]
    # Progress of models, by signature: counters and flags that have to be equal on all ranks.
    progress: dict[str, Progress]
    uses_meshs: bool = True  # whether the mesh's groups are in use, not set aside
    # torch's counter of groups of a program, by the name of its default group.
    program: dict[str, int] = {}
    lack: str = ""  # why it cannot connect its groups; "" if it can


class Healing:
    """One rank's part in a heal: it exchanges states with the other participants, and resets
    models accordingly.

    Args:
        store: store of the mesh.
        prefix: prefix of this heal's keys in the store.
        rank: this rank.
        participants: ranks that take part.

    Attributes:
        store: store of this heal alone, which the groups made in it use for as long as they exist.
        states: states of all participants by rank, once they are exchanged.
    """

    def __init__(
        self, store: MeshStore, prefix: str, rank: int, participants: frozenset[int]
    ) -> None:
        self.store = InterruptibleStore(PrefixStore(prefix, store), store.waits)
        self.store.note_keys()
        self._rank, self._participants = rank, sorted(participants)
        self.states: dict[int, StateAtHeal] = {}

    def exchange_states(self, ours: StateAtHeal) -> None:
        """Exchange the participants' states; raise `GroupDown` if a rank does not answer or cannot
        connect its groups.
        """
        received = self.exchange("present", msgspec.msgpack.encode(ours))
        self.states = {
            rank: msgspec.msgpack.decode(data, type=StateAtHeal) for rank, data in received.items()
        }
        lacks = [f"rank {rank}: {other.lack}" for rank, other in self.states.items() if other.lack]
        if lacks:
            raise GroupDown(
                f"healing the process groups was given up. {'; '.join(lacks)}. Then %dist_heal"
            )

    def exchange(self, topic: str, ours: bytes) -> dict[int, bytes]:
        """Send a value to all participants, and return their values by rank; raise `GroupDown` if a
        rank does not take part.
        """
        keys = {rank: f"{topic}/{rank}" for rank in self._participants}
        self.store.set(keys[self._rank], ours)
        try:
            self.store.wait(list(keys.values()), _PATIENCE)
        except DistStoreError as error:
            missing = [str(rank) for rank, key in keys.items() if not self.store.check([key])]
            raise GroupDown(
                f"healing the process groups was given up: rank {', '.join(missing)} did not take "
                "part. %dist_heal tries again"
            ) from error
        return dict(zip(keys, self.store.multi_get(list(keys.values())), strict=True))

    def why_not(self, plan: GroupPlan, world_size: int) -> str:
        """Return why a process group of this rank cannot be connected now; "" if it can."""
        members = plan.members(world_size)
        missing = [rank for rank in members if rank not in self.states]
        if missing:
            return f"{_ranks(missing)} missing"
        if not plan.ranks:
            return ""  # the default group, which ranks that had destroyed it have made again
        wanted = (plan.name, plan.ranks)
        without = [
            rank
            for rank in members
            if all(wanted != (other.name, other.ranks) for other in self.states[rank].groups)
        ]
        return f"{_ranks(without)} without it" if without else ""

    def reset(self, models: Survey) -> tuple[str, ...]:
        """Reset this rank's models, so that all ranks' models are in the same state, as between two
        training steps; return notes for the user.
        """
        progress: dict[str, set[Progress]] = {}
        for other in self.states.values():
            for signature, found in other.progress.items():
                progress.setdefault(signature, set()).add(found)
        differing = {
            signature: sorted(found) for signature, found in progress.items() if len(found) > 1
        }
        half_done = {name for other in self.states.values() for name in other.half_done}
        return models.reset(half_done, differing)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{describe_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
