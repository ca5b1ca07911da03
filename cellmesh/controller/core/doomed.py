"""Which ranks are to be replaced once they are dead. Pure."""

from __future__ import annotations

from collections.abc import Collection

from .mesh_state import Board


class Doomed:
    """Ranks that are to be replaced, and whether for no other reason than that the user asks for
    it.

    Args:
        board: the mesh.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._ranks: set[int] = set()
        self._asked: set[int] = set()

    def missing(self) -> tuple[int, ...]:
        """Those that are dead: they are about to be replaced, and runs for them wait."""
        return tuple(sorted(self._ranks & self._board.dead.keys()))

    def add(self, ranks: Collection[int]) -> None:
        """These are replaced, whatever the user asks for."""
        self._ranks.update(ranks)
        self._asked.difference_update(ranks)

    def ask_for(self, ranks: Collection[int]) -> None:
        """The user asks for these."""
        self._asked |= set(ranks) - self._ranks
        self._ranks |= self._asked

    def withdraw(self) -> None:
        """The user asks no longer, or in vain."""
        self._ranks -= self._asked
        self._asked.clear()

    def spare(self, ranks: Collection[int]) -> None:
        """These are new, or cannot be replaced."""
        self._ranks.difference_update(ranks)
        self._asked.difference_update(ranks)

    def clear(self) -> None:
        """Nobody is replaced."""
        self._ranks.clear()
        self._asked.clear()
