"""Requests to ranks to save and load checkpoints with torch.distributed.checkpoint."""

from __future__ import annotations

from typing import ClassVar

from .verb import FeatureRequest


class CheckSave(FeatureRequest, frozen=True):
    """Ask a rank why it cannot save these variables to a path; "" if it can. No collective."""

    names: tuple[str, ...]
    path: str


class SaveNames(FeatureRequest, frozen=True):
    """Ask ranks to save these variables to a path; a collective."""

    names: tuple[str, ...]
    path: str


class CheckLoad(FeatureRequest, frozen=True):
    """Ask a rank why it cannot load these variables from a path; "" if it can. No collective."""

    names: tuple[str, ...]
    path: str


class LoadNames(FeatureRequest, frozen=True):
    """Ask ranks to load these variables (none given: all saved ones) in place, and to answer with
    the names of those loaded; a collective.
    """

    fills: ClassVar[bool] = True

    names: tuple[str, ...]
    path: str


AnyRequest = CheckSave | SaveNames | CheckLoad | LoadNames
