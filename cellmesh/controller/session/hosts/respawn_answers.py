"""Joins what the agents of several hosts answer to one `Respawn`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....wire.codec import Parcel
from ....wire.messages import Respawned, RespawnFailed
from ....wire.status import RankInfo


class RespawnAnswers:
    """The answers to one order to fork ranks again, until every host has answered it."""

    def __init__(self) -> None:
        self._awaited: dict[int, tuple[int, ...]] = {}  # host -> ranks that it is to fork
        self._respawned: tuple[RankInfo, ...] = ()
        self._failed: tuple[int, ...] = ()
        self._why = ""

    def begin(
        self, awaited: Mapping[int, tuple[int, ...]], gone: tuple[int, ...], why_gone: str
    ) -> list[Parcel[Any]]:
        """Note an order.

        Args:
            awaited: by host, the ranks that it is to fork.
            gone: the ranks whose hosts are lost.
            why_gone: says so; "" if there are none.

        Returns:
            What the controller is to hear, if no host is awaited.
        """
        self._awaited, self._respawned = dict(awaited), ()
        self._failed, self._why = gone, why_gone
        return self._take()

    def succeeded(self, index: int, infos: tuple[RankInfo, ...]) -> list[Parcel[Any]]:
        """Note that a host has forked its ranks; return what the controller is to hear."""
        self._respawned += infos
        self._awaited.pop(index, None)
        return self._take()

    def failed(self, index: int, ranks: tuple[int, ...], why: str) -> list[Parcel[Any]]:
        """Note that a host could not fork ranks; return what the controller is to hear."""
        self._failed += ranks
        self._why = "; ".join(filter(None, [self._why, why]))
        self._awaited.pop(index, None)
        return self._take()

    def lost(self, index: int, name: str) -> list[Parcel[Any]]:
        """Note that a host is lost; return what the controller is to hear if it was awaited."""
        if index not in self._awaited:
            return []
        return self.failed(index, self._awaited[index], f"{name} is lost")

    def _take(self) -> list[Parcel[Any]]:
        up: list[Parcel[Any]] = []
        if self._awaited:
            return up
        if self._failed:  # first, as it ends the recovery's wait; the others join the next
            up.append(Parcel(RespawnFailed(self._failed, self._why)))
        if self._respawned:
            up.append(Parcel(Respawned(self._respawned)))
        self._respawned, self._failed = (), ()
        return up
