"""The state of a mesh, as its agent reports it, and waits for another state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...stdlib import time
from ...wire.messages import MeshReady
from ...wire.messages import Progress as ProgressVerb
from ..core.core import Change, State
from .ending import End
from .start_progress import StartProgress


class Life:
    """The state of one mesh; usable on any thread.

    Args:
        num_ranks: of the mesh.
        started_at: when the mesh was asked for, in seconds.
        on_progress: called in the link's loop with how far the start has come.

    Attributes:
        state: where the mesh is.
        end: why there is no more to be done with the mesh; None as long as there is.
        start_s: how long the last start took, in seconds.
    """

    def __init__(
        self,
        num_ranks: int,
        started_at: float,
        on_progress: Callable[[StartProgress], None] | None,
    ) -> None:
        self.state: State = "connecting"
        self.end: End | None = None
        self.start_s = 0.0
        self._num_ranks = num_ranks
        self._started_at = started_at
        self._on_progress = on_progress
        self._condition = threading.Condition()

    def restart(self, on_progress: Callable[[StartProgress], None] | None) -> None:
        """Note that all ranks are about to be replaced."""
        self._on_progress = on_progress
        with self._condition:
            self.state = "restarting"
        self._started_at = time.monotonic()

    def note(self, change: Change) -> None:
        """Note a change of the mesh's state; called in the link's loop."""
        cause = change.cause
        elapsed_s = time.monotonic() - self._started_at
        if isinstance(cause, MeshReady):
            self.start_s = elapsed_s
        if isinstance(cause, ProgressVerb) and self._on_progress is not None:
            self._on_progress(
                StartProgress(cause.stage, cause.num_ready, self._num_ranks, elapsed_s)
            )
        with self._condition:
            self.state = change.state
            if isinstance(cause, End) and self.end is None:
                self.end = cause
            self._condition.notify_all()

    def wait(
        self, is_there: Callable[[], bool], timeout_s: float, give_up: Callable[[], None]
    ) -> bool:
        """Wait until a condition holds or the mesh has ended; return whether either happened in
        time.

        Args:
            is_there: whether to wait no longer.
            timeout_s: how long, in seconds.
            give_up: called where Ctrl-C ends the wait.
        """
        try:
            with self._condition:
                return self._condition.wait_for(
                    lambda: is_there() or self.end is not None, timeout_s
                )
        except BaseException:  # Ctrl-C
            give_up()
            raise

    def forget_progress(self) -> None:
        """Report the progress of the start no longer."""
        self._on_progress = None
