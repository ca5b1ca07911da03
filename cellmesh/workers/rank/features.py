"""The request handlers of a rank's optional features (inspector, checkpoints, traces), and the
objects of the rank that they may use.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...stdlib import os
from ...wire.codec import Frame, Parcel
from ...wire.messages import FeatureRequest, Pickled
from ...wire.peer_calls import PeerWork
from ..groups import model_reset
from .imports import load
from .optimizer_steps import OptimizerSteps

if TYPE_CHECKING:
    import torch

    from ..groups.groups import Groups
    from ..groups.ledger import GroupRecord
    from .actors import Actors
    from .handles import Handles
    from .interrupts import Interrupts
    from .shell import RankShell
    from .value_transfer import SegmentLink


class Packed(NamedTuple):
    """An answer to a feature's request that is already pickled."""

    pickled: Pickled
    buffers: list[Frame]


class Handler(Protocol):
    """Protocol of an object that answers the requests of one optional feature on a rank; each
    feature's module has a `make_handler` for it.
    """

    def handle(self, request: Any, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; the answer is a value that can be pickled, or a
        `Packed`.
        """

    def handle_beside(self, request: Any) -> Any:
        """Answer a query on another thread, while the main thread may run user code."""


class CellObserver(Protocol):
    """Protocol of a feature's object that is called when a cell starts and when it ends."""

    def start(self) -> None:
        """Start to observe the cell, which is about to begin."""

    def stop(self) -> None:
        """Stop observing the cell, which has ended."""


@dataclass
class RankContext:
    """The objects of a rank that features' handlers may use, and the handlers made so far."""

    shell: RankShell
    groups: Groups
    interrupts: Interrupts
    segments: SegmentLink
    device: torch.device
    code: str = ""  # directory with copies of the user's modules, on another host (`CodeStore`)
    pid: int = field(default_factory=os.getpid)  # of the rank, not of a process that it has forked
    steps: OptimizerSteps = field(default_factory=OptimizerSteps)
    observer: CellObserver | None = None
    # Releases the main thread from an operation on a group, begun before a time, with the reason.
    release_from: Callable[[GroupRecord, float, str], None] = lambda record, before, why: None
    tasks: Any = None  # its `Tasks`
    divert: Callable[[Callable[[Any], Any]], None] = lambda choose: None  # `Pump.divert`
    report: Callable[[Parcel[Any]], None] = lambda parcel: None  # `Pump.send`
    stop: Callable[[int], None] = lambda run: None  # interrupts a run wherever it is
    post: Callable[[Parcel[Any]], None] = lambda parcel: None  # beside the main thread's
    _handlers: dict[str, Handler] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @functools.cached_property
    def actors(self) -> Actors:
        """The actors of the rank."""
        made: Actors = load("rank.actors").Actors(self.shell.user_ns, self.groups.rank)
        made.on_made = lambda: self.handles.listen()
        made.serve = lambda *args, **kwargs: self.handles.serve(*args, **kwargs)
        return made

    @functools.cached_property
    def handles(self) -> Handles:
        """The handles of actors that have arrived on the rank."""
        made: Handles = load("rank.handles").Handles(self)
        return made

    def describe_wait(self) -> str:
        """Return for which calls of other ranks' actors the main thread waits; "" for none."""
        return self.handles.describe_wait() if "handles" in vars(self) else ""

    def serving(self) -> PeerWork | None:
        """Return the call of another rank that the main thread executes; None if there is none."""
        return self.handles.served.serving() if "handles" in vars(self) else None

    def find_handler(self, request: FeatureRequest) -> Handler:
        """Return the handler of a feature's request; raise a CellmeshError if its module cannot be
        imported. Usable on any thread.
        """
        module = request.handler
        with self._lock:
            if module not in self._handlers:
                self._handlers[module] = load(module).make_handler(self)
            return self._handlers[module]

    def look_after_failure(self, tb: types.TracebackType | None = None) -> None:
        """Record that models may be half updated if an exception in user code has interrupted their
        training step.
        """
        try:
            self.groups.backward_passes.look(tb)
            is_dirty = model_reset.look_after_failure()
        except BaseException:  # such as an interrupt, as code of a model does not return
            is_dirty = True
        if is_dirty:
            self.groups.is_half_done = True
