"""Answers a rank's requests for completion and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...wire.codec import Frame
from ...wire.completion import AnyRequest, Complete, Completions
from .complete import complete
from .help import explain

if TYPE_CHECKING:
    from ..rank.features import RankContext


@dataclass(frozen=True)
class CompletionHandler:
    """Answers requests for completions and help on one rank, on any thread.

    Args:
        context: the rank's.
    """

    context: RankContext

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Completions | str:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        return self.handle_beside(request)

    def handle_beside(self, request: AnyRequest) -> Completions | str:
        """Answer a request for completions or help, on any thread, without running user code."""
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(request, Complete):
                return complete(self.context.shell, request)
            return explain(self.context.shell, request)


make_handler = CompletionHandler
