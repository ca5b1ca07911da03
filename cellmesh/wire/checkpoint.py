"""Requests for checkpoints (torch.distributed.checkpoint)."""

from __future__ import annotations

from typing import ClassVar

from .verb import FeatureRequest


class CheckSave(FeatureRequest, frozen=True):
    """Ask a rank why it cannot save names at a path ("": it can); runs no collective."""

    names: tuple[str, ...]
    path: str


class SaveNames(FeatureRequest, frozen=True):
    """Save names. Collective; with `waits`, the answer follows when all files are written."""

    names: tuple[str, ...]
    path: str
    waits: bool = True


class CheckLoad(FeatureRequest, frozen=True):
    """Ask a rank why it cannot load names from a path ("": it can); runs no collective."""

    names: tuple[str, ...]
    path: str


class LoadNames(FeatureRequest, frozen=True):
    """Load names in place (an empty list for all saved ones); answer with the loaded names.
    Collective.
    """

    fills: ClassVar[bool] = True

    names: tuple[str, ...]
    path: str


class FinishSave(FeatureRequest, frozen=True):
    """Ask a rank to answer once the save that it writes in the background, if any, has ended."""


AnyRequest = CheckSave | SaveNames | CheckLoad | LoadNames | FinishSave
