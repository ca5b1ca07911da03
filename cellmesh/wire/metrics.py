"""The message in which a rank sends numbers that user code reports with `cellmesh.log`."""

from __future__ import annotations

from .verb import Verb


class Logged(Verb, frozen=True):
    """Numbers that user code of a rank gave to `cellmesh.log`, in the order of their steps.

    Each row of `values` belongs to one name of `names`; its columns to `steps`.
    """

    run: int
    names: tuple[str, ...]
    steps: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
