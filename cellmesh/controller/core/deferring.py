"""Runs that wait until the mesh is calm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...wire.codec import Parcel
from ...wire.messages import Relay
from .effects import Effect, Send
from .mesh_state import Board

# Tells a run how some of its ranks have ended it: run, ranks, what they said, seconds.
Settle = Callable[[int, tuple[int, ...], Parcel[Any], float], list[Effect]]


class Deferred:
    """Work that has been submitted and not sent, in order.

    Args:
        board: has the runs.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._waiting: dict[int, Parcel[Relay]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, run: int, parcel: Parcel[Any]) -> None:
        """Keep a run."""
        self._board.pending[run].is_sent = False
        self._waiting[run] = parcel

    def take_back(self, run: int) -> bool:
        """Drop a run; whether it was here."""
        return self._waiting.pop(run, None) is not None

    def send_all(self, now: float, settle: Settle) -> list[Effect]:
        """Send them to those of their ranks that live.

        Args:
            now: seconds.
            settle: tells a run of those that do not.
        """
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for run, (relay, frames) in waiting.items():
            pending = self._board.pending.get(run)
            if pending is not None:
                pending.begin(now)
                dead = self._board.dead
                ranks = tuple(
                    rank for rank in relay.ranks if rank in pending.ranks and rank not in dead
                )
                if pending.fills:
                    effects += self._board.news.tell(run)
                if ranks:
                    effects.append(
                        Send(Parcel(msgspec.structs.replace(relay, ranks=ranks), frames))
                    )
                for rank in sorted(pending.ranks & dead.keys()):
                    effects += settle(run, (rank,), Parcel(dead[rank]), now)
        return effects
