"""The exchange of ranks through the mesh's store at a heal: each reports its state, and all agree
on the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch.distributed import DistStoreError

from ...errors import GroupDown
from .blueprint import GroupPlan, Presence
from .model_reset.kinds import Progress
from .model_reset.survey import Survey, with_unsettled_buckets
from .store import MeshStore

# How long ranks wait for each other.
_PATIENCE = timedelta(seconds=60)


class Meeting:
    """The exchange of one heal.

    Args:
        store: where they meet.
        prefix: of its keys; not used before.
        rank: ours.
        participants: all that take part.

    Attributes:
        keys: those that this rank has set in the store.
        present: the state of each participant (after `tell_presence`).
    """

    def __init__(
        self, store: MeshStore, prefix: str, rank: int, participants: frozenset[int]
    ) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._participants = sorted(participants)
        self.keys: list[str] = []
        self.present: dict[int, Presence] = {}

    def tell_presence(self, ours: Presence) -> None:
        """Send the other participants what this rank has, and receive what they have.

        Raises:
            GroupDown: one does not answer, or cannot connect.
        """
        told = self.exchange("present", msgspec.msgpack.encode(ours))
        self.present = {
            rank: msgspec.msgpack.decode(data, type=Presence) for rank, data in told.items()
        }
        lacks = [f"rank {rank}: {other.lack}" for rank, other in self.present.items() if other.lack]
        if lacks:
            raise GroupDown(
                f"healing the process groups was given up. {'; '.join(lacks)}. Then %dist_heal"
            )

    def exchange(self, topic: str, ours: bytes) -> dict[int, bytes]:
        """Send a value to every participant, and receive each participant's value.

        Raises:
            GroupDown: one does not take part.
        """
        keys = {rank: f"{self._prefix}/{topic}/{rank}" for rank in self._participants}
        self.keys.append(keys[self._rank])
        self._store.set(keys[self._rank], ours)
        try:
            self._store.wait(list(keys.values()), _PATIENCE)
        except DistStoreError as error:
            missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
            raise GroupDown(
                f"healing the process groups was given up: rank {', '.join(missing)} did not come. "
                "%dist_heal tries again"
            ) from error
        return dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))

    def why_not(self, plan: GroupPlan, world_size: int) -> str:
        """Why a group of this rank cannot be connected now; "" if it can."""
        members = plan.members(world_size)
        missing = [rank for rank in members if rank not in self.present]
        if missing:
            return f"{_ranks(missing)} missing"
        if not plan.ranks:
            return ""  # ranks that had destroyed the default group have made it again
        wanted = (plan.name, plan.ranks)
        without = [
            rank
            for rank in members
            if all(wanted != (other.name, other.ranks) for other in self.present[rank].groups)
        ]
        return f"{_ranks(without)} without it" if without else ""

    def reset(self, models: Survey) -> tuple[str, ...]:
        """Reset the models to a state between two steps, alike on all ranks; returns remarks for
        the user.
        """
        progress: dict[str, set[Progress]] = {}
        for other in self.present.values():
            for signature, found in other.progress.items():
                progress.setdefault(signature, set()).add(found)
        differing = {
            signature: sorted(found) for signature, found in progress.items() if len(found) > 1
        }
        if unsettled := with_unsettled_buckets(differing):
            orders: dict[str, set[tuple[str, ...]]] = {}
            ours = msgspec.msgpack.encode(models.finish_buckets(unsettled))
            for received in self.exchange("buckets", ours).values():
                for signature, digests in msgspec.msgpack.decode(
                    received, type=dict[str, tuple[str, ...]]
                ).items():
                    orders.setdefault(signature, set()).add(digests)
            models.restart_buckets(
                {signature for signature, found in orders.items() if len(found) > 1}
            )
        half_done = {name for other in self.present.values() for name in other.half_done}
        return models.reset(half_done, differing)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
