"""Answers requests about replicas (see `wire.replicas`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...wire import payload
from ...wire.codec import Frame
from ...wire.replicas import (
    AnyRequest,
    Check,
    Compare,
    GatherNames,
    GatherTensor,
    SurveyNames,
    Sync,
)
from ..rank.features import Packed
from . import checking, copying, syncing

if TYPE_CHECKING:
    from ..rank.features import RankContext


class ReplicaHandler:
    """Answers the requests about replicas on one rank.

    Args:
        context: the rank's.
    """

    def __init__(self, context: RankContext) -> None:
        self._namespace = context.shell.user_ns
        self._segments = context.segments

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        namespace = self._namespace
        match request:
            case Check():
                return checking.check(namespace, request.expression)
            case Compare():
                theirs = payload.loads(request.payload, buffers, self._segments)
                return checking.compare(namespace, request.expression, request.path, theirs)
            case GatherTensor():
                return checking.find_tensor(namespace, request.expression, request.path)
            case Sync():
                return syncing.sync(namespace, request.expression, request.source)
            case SurveyNames():
                return copying.survey(namespace)
            case GatherNames():
                return Packed(*copying.gather(namespace, request.names))

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: requests about replicas are answered on the main thread
        only.
        """
        raise NotImplementedError(request)


make_handler = ReplicaHandler
