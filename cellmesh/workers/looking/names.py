"""To be written."""

from __future__ import annotations

from ...wire.looks import Named, Names
from ..shell import RankShell


def names(shell: RankShell, subject: Names) -> tuple[Named, ...]:
    raise NotImplementedError
