"""The handlers of requests of a rank's optional features (inspector, checkpoints, traces), and the
parts of a rank that they may use.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from ...wire import checkpoint, inspect, replicas, trace
from ...wire.codec import Frame
from ...wire.messages import FeatureRequest, Pickled
from ..groups import model_reset
from .imports import load
from .optimizer_steps import OptimizerSteps

if TYPE_CHECKING:
    import torch

    from ..groups.groups import Groups
    from .interrupts import Interrupts
    from .shell import RankShell
    from .value_transfer import SegmentLink


# The handlers' modules in `cellmesh.workers`, imported when first needed (see `features`).
_MODULES: Mapping[type, str] = {
    request: module
    for union, module in (
        (inspect.AnyRequest, "inspect.handler"),
        (inspect.CompletionRequest, "complete"),
        (replicas.AnyRequest, "replicas.handler"),
        (checkpoint.AnyRequest, "checkpoint"),
        (trace.AnyRequest, "trace.torch_profiler"),
    )
    for request in get_args(union) or (union,)
}


class Packed(NamedTuple):
    """An answer to a feature's request that is pickled already."""

    pickled: Pickled
    buffers: list[Frame]


class Handler(Protocol):
    """Answers the requests of one feature on a rank; the feature's `make_handler` makes it."""

    def handle(self, request: Any, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread: with any value that can be pickled, or `Packed`."""

    def handle_beside(self, request: Any) -> Any:
        """Answer a query on another thread, while the main thread may run user code."""


class CellObserver(Protocol):
    """Protocol of a feature that observes a cell from its first statement to its last."""

    def start(self) -> None:
        """Begin to observe the cell, which begins now."""

    def stop(self) -> None:
        """Stop observing the cell, which has ended."""


@dataclass
class RankContext:
    """The parts of a rank that handlers may use, and the handlers made so far."""

    shell: RankShell
    groups: Groups
    interrupts: Interrupts
    segments: SegmentLink
    device: torch.device
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    observer: CellObserver | None = None
    _handlers: dict[str, Handler] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def find_handler(self, request: FeatureRequest) -> Handler:
        """Return the handler of a request, on any thread; CellmeshError if it does not import."""
        module = _MODULES[type(request)]
        with self._lock:
            if module not in self._handlers:
                self._handlers[module] = load(module).make_handler(self)
            return self._handlers[module]

    def look_after_failure(self, tb: types.TracebackType | None = None) -> None:
        """Mark models to be reset if user code raised in the middle of a training step."""
        try:
            self.groups.backward_passes.look(tb)
            is_dirty = model_reset.look_after_failure()
        except BaseException:  # an interrupt, since code of a model's does not end
            is_dirty = True
        if is_dirty:
            self.groups.is_half_done = True
