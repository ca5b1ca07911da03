"""Answers requests for profiles of a rank's cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...wire.codec import Frame
from ...wire.trace import AnyRequest, BeginProfile, RankProfile
from .torch_profiler import CellProfiler

if TYPE_CHECKING:
    from ..rank.features import RankContext


class ProfileHandler:
    """Begins and ends profiles of cells on one rank.

    Args:
        context: the rank's.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._profiler: CellProfiler | None = None

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> RankProfile | None:
        """Begin or end a profile, on the main thread; see `rank.features.Handler`."""
        profiler, self._profiler = self._profiler, None
        if isinstance(request, BeginProfile):
            self._profiler = CellProfiler(self._context.groups.ledger.spans, self._context.device)
        self._context.observer = self._profiler
        if profiler is None or isinstance(request, BeginProfile):
            return None
        return profiler.collect(request.trace_path, request.max_trace_bytes)

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: profiles begin and end on the main thread only."""
        raise NotImplementedError(request)


make_handler = ProfileHandler
