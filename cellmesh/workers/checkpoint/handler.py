"""Answers requests about checkpoints on a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...wire.checkpoint import (
    AnyRequest,
    CheckLoad,
    CheckSave,
    FinishSave,
    LoadNames,
    SaveNames,
)
from ...wire.codec import Frame
from .saving import Checkpoints

if TYPE_CHECKING:
    from ..rank.features import RankContext


class CheckpointHandler:
    """Answers requests to check, save and load checkpoints on one rank.

    Args:
        context: the rank's.
    """

    def __init__(self, context: RankContext) -> None:
        self._checkpoints = Checkpoints(context.shell.user_ns)

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        match request:
            case CheckSave(names, path):
                return self._checkpoints.check_save(names, path)
            case SaveNames(names, path, waits):
                return self._checkpoints.save(names, path, waits)
            case CheckLoad(names, path):
                return self._checkpoints.check_load(names, path)
            case LoadNames(names, path):
                return self._checkpoints.load(names, path)
            case FinishSave():
                return self._checkpoints.finish()

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: requests about checkpoints are answered on the main thread
        only.
        """
        raise NotImplementedError(request)


make_handler = CheckpointHandler
