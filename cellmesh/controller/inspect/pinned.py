"""Values that ranks keep for inspections, as code was run to have them; and how they are let go
of.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...errors import CellmeshError
from ...wire.inspect import Forget, OfValue
from ..rank_set import RankSet
from .query import look

if TYPE_CHECKING:
    from ..session.session import Session

Subject = TypeVar("Subject", bound=OfValue)


class PinnedValue:
    """A value that ranks keep: as long as this lives, is not let go of, and no four newer ones are
    kept.

    Whoever shows it lets go of it once it is shown anew or stands still.

    Args:
        session: of the mesh.
        ranks: who keeps it.

    Attributes:
        token: by which they know it.
    """

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self.token = secrets.token_hex(8)
        self.session = session
        self._ranks = tuple(ranks)
        # The collector may call this anywhere, so that it asks nobody: see `forget_what_is_gone`.
        gone = session.beside.gone_holds
        self._finalizer = weakref.finalize(self, gone.append, (self.token, self._ranks))
        self._finalizer.atexit = False

    def let_go(self) -> None:
        """Have the ranks keep it no more; does not wait."""
        if self._finalizer.detach():
            _forget(self.session, self.token, self._ranks)


def about(subject: Subject, pinned: PinnedValue | None) -> Subject:
    """The subject, asked of the pinned value."""
    return subject if pinned is None else msgspec.structs.replace(subject, token=pinned.token)


def forget_what_is_gone(session: Session) -> None:
    """Have ranks let go of what was kept for inspections that are gone; does not wait."""
    gone = session.beside.gone_holds
    while gone:
        _forget(session, *gone.popleft())


def _forget(session: Session, token: str, ranks: Sequence[int]) -> None:
    try:
        look(RankSet(session, ranks), Forget((token,)), is_beside=True, timeout_s=0.0)
    except CellmeshError:  # the mesh has ended, and they with it
        pass
