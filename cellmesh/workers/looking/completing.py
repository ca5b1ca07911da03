"""To be written."""

from __future__ import annotations

from ...wire.looks import Complete, Completions, Explain
from ..shell import RankShell


def complete(shell: RankShell, subject: Complete) -> Completions:
    raise NotImplementedError


def explain(shell: RankShell, subject: Explain) -> str:
    raise NotImplementedError
