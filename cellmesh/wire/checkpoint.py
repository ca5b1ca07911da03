"""Checkpoints (torch.distributed.checkpoint): what ranks are asked."""

from __future__ import annotations

from typing import ClassVar

from .verb import FeatureRequest


class CheckSave(FeatureRequest, frozen=True):
    """Answer why this rank cannot save names at a path, "" if it can; runs no collective."""

    names: tuple[str, ...]
    path: str


class SaveNames(FeatureRequest, frozen=True):
    """Save names. Collective; with `waits`, answered when all is written."""

    names: tuple[str, ...]
    path: str
    waits: bool = True


class CheckLoad(FeatureRequest, frozen=True):
    """Answer why this rank cannot load names from a path, "" if it can; runs no collective."""

    names: tuple[str, ...]
    path: str


class LoadNames(FeatureRequest, frozen=True):
    """Load names, none for all that were saved, in place; answer with those loaded. Collective."""

    fills: ClassVar[bool] = True

    names: tuple[str, ...]
    path: str


class FinishSave(FeatureRequest, frozen=True):
    """Answer when this rank writes nothing."""


AnyRequest = CheckSave | SaveNames | CheckLoad | LoadNames | FinishSave
