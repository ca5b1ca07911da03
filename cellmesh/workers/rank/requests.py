"""The table from requests to the features of a rank that answer them: the one place where features
are registered.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from ...wire import checkpoint, comms, completion, inspect, profile, replicas
from ...wire.codec import Frame
from ...wire.messages import FeatureRequest, Pickled
from ..groups import model_reset
from .features import load

if TYPE_CHECKING:
    import torch

    from ..groups.groups import Groups
    from .interrupts import Interrupts
    from .segment_link import SegmentLink
    from .shell import RankShell

# The handlers' modules in `cellmesh.workers`, imported when first needed (see `features`).
_MODULES: Mapping[type, str] = {
    request: module
    for union, module in (
        (inspect.AnyRequest, "inspect.handler"),
        (completion.AnyRequest, "completion.handler"),
        (replicas.AnyRequest, "replicas.handler"),
        (checkpoint.AnyRequest, "checkpoint.handler"),
        (profile.AnyRequest, "trace.handler"),
        (comms.AnyRequest, "comms"),
    )
    for request in get_args(union) or (union,)
}


class CellObserver(Protocol):
    """Observes a cell from its first statement to its last."""

    def start(self) -> None:
        """Called when the cell begins."""

    def stop(self) -> None:
        """Called when the cell has ended."""


@dataclass
class RankContext:
    """The parts of a rank that handlers may use.

    Attributes:
        shell: runs cells; its namespace is the rank's.
        groups: the process groups.
        interrupts: what the main thread runs.
        segments: takes large values in.
        device: where the rank computes.
        observer: watches the cells that run.
    """

    shell: RankShell
    groups: Groups
    interrupts: Interrupts
    segments: SegmentLink
    device: torch.device
    observer: CellObserver | None = None

    def look_after_failure(self) -> None:
        """Mark models for a reset if user code raised in the middle of a step."""
        try:
            is_dirty = model_reset.look_after_failure()
        except BaseException:  # an interrupt, since code of a model's does not end
            is_dirty = True
        if is_dirty:
            self.groups.mark_broken()


class Packed(NamedTuple):
    """An answer that is pickled already."""

    pickled: Pickled
    buffers: list[Frame]


class Handler(Protocol):
    """Answers the requests of one feature; a feature's module makes it with `make_handler`."""

    def handle(self, request: Any, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread: any value that can be pickled, or `Packed`."""

    def handle_beside(self, request: Any) -> Any:
        """Answer a query on another thread, while the main thread may run user code."""


class Handlers:
    """The handlers of a rank, each made when its feature is first asked; used on any thread.

    Args:
        context: what they may use.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._lock = threading.RLock()
        self._made: dict[str, Handler] = {}

    def find(self, request: FeatureRequest) -> Handler:
        """The handler of a request.

        Raises:
            CellmeshError: the feature cannot be imported.
        """
        module = _MODULES[type(request)]
        with self._lock:
            if module not in self._made:
                self._made[module] = load(module).make_handler(self._context)
            return self._made[module]
