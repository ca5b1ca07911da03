"""Records the state of a mesh as its agent reports it, lets threads wait for a state, and makes the
errors on a mesh that has ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import msgspec

from ...errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ...stdlib import time
from ...wire.attach import Detached, Refused
from ...wire.messages import MeshReady, StartFailed, Stopped
from ...wire.messages import Progress as ProgressVerb
from ..core.core import Change, State
from ..news import News
from ..output.console import Sink

# Messages after which a mesh cannot be used any more.
End = StartFailed | Refused | Detached | Stopped


_NO_FILES = os.strerror(errno.EMFILE)
_MORE_FILES = ". `ulimit -n 4096` in the shell, before this program, allows more of them"


class StartProgress(msgspec.Struct, frozen=True):
    """The stage of a mesh's start or restart, and how many ranks are ready.

    Attributes:
        stage: name of the stage, e.g. ``importing torch``.
        num_ready: number of ranks that are ready.
        num_ranks: number of ranks of the mesh.
        elapsed_s: time since the start began, in seconds.
    """

    stage: str
    num_ready: int
    num_ranks: int
    elapsed_s: float


def show_progress(sink: Sink) -> Callable[[StartProgress], None]:
    """Return a function that shows the progress of a start as the status line of a sink."""

    def show(progress: StartProgress) -> None:
        count = f" {progress.num_ready}/{progress.num_ranks}" if progress.num_ready else ""
        sink.status(f"starting: {progress.stage}{count} ({progress.elapsed_s:.1f} s)", False)

    return show


class Life:
    """The state of one mesh (starting, ready, ended), for which threads can wait.

    Args:
        name: name of the mesh.
        num_ranks: number of ranks of the mesh.
        started_at: when the start was requested, in seconds of the monotonic clock; None for now.
        on_progress: called with the progress of the start, in the link's loop.

    Attributes:
        state: the state of the mesh.
        end: the message after which the mesh cannot be used any more; None while it can.
        has_left: whether the session has left the mesh.
        start_s: duration of the last start, in seconds.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        started_at: float | None,
        on_progress: Callable[[StartProgress], None] | None,
    ) -> None:
        self._name = name
        self.state: State = "connecting"
        self.end: End | None = None
        self.has_left = False
        self.start_s = 0.0
        self.num_ranks = num_ranks
        self._started_at = time.monotonic() if started_at is None else started_at
        self._on_progress = on_progress
        self._news = News()

    def restart(self, on_progress: Callable[[StartProgress], None] | None) -> None:
        """Record that a restart of all ranks begins, and set the function to call with its
        progress.
        """
        self._on_progress = on_progress
        self.state = "restarting"
        self._started_at = time.monotonic()

    def note(self, change: Change) -> None:
        """Record a new state of the mesh, and wake the threads that wait for it; called on the
        link's thread.
        """
        cause = change.cause
        elapsed_s = time.monotonic() - self._started_at
        if isinstance(cause, MeshReady):
            self.start_s = elapsed_s
        if isinstance(cause, ProgressVerb) and self._on_progress is not None:
            self._on_progress(
                StartProgress(cause.stage, cause.num_ready, self.num_ranks, elapsed_s)
            )
        if isinstance(cause, End) and self.end is None:
            self.end = cause
        self.state = change.state
        self._news.report()

    def wait(
        self, is_there: Callable[[], bool], timeout_s: float, give_up: Callable[[], None]
    ) -> bool:
        """Wait until a condition holds or the mesh has ended; return whether either happened in
        time.

        Args:
            is_there: the condition.
            timeout_s: time limit in seconds.
            give_up: called if Ctrl-C ends the wait.
        """
        try:
            return self._news.wait_for(lambda: is_there() or self.end is not None, timeout_s)
        except BaseException:  # Ctrl-C
            give_up()
            raise

    def forget_progress(self) -> None:
        """Stop reporting the progress of the mesh's start."""
        self._on_progress = None

    # ---- the end

    def is_over(self) -> bool:
        """Return whether the mesh has ended or this process has left it."""
        return self.end is not None or self.has_left

    @property
    def reason(self) -> str:
        """Why the mesh has ended, as far as it is known; "" if it has not."""
        if self.end is None:
            return ""
        return self.end.text if isinstance(self.end, StartFailed) else self.end.reason

    def describe_end(self) -> str:
        """Return a sentence on the end of the mesh and its reason; "" if it has not ended."""
        if isinstance(self.end, Detached):
            return f"this notebook has left {self._name} ({self.reason})"
        return f"{self._name} has ended{self._in_brackets()}" if self.is_over() else ""

    def refuse_use(self) -> NoMeshError:
        """Return the error to raise for work on a mesh that is not ready."""
        if isinstance(self.end, Detached):
            return NoMeshError(
                f"the mesh lives on without this notebook{self._in_brackets()}: `%dist_attach "
                f"{self._name}` has it again, with --steal if somebody holds it"
            )
        return NoMeshError(
            f"the mesh {self._name} is {self.state}{self._in_brackets()}: start another with "
            "`%dist_start` or cellmesh.start()"
        )

    def explain_start(self, timeout_s: float, log: str) -> CellmeshError:
        """Return the error to raise for a start that failed or took too long.

        Args:
            timeout_s: time limit of the start, in seconds.
            log: the end of the agent's log.
        """
        if isinstance(self.end, StartFailed):
            more = _MORE_FILES if _NO_FILES in self.end.text else ""
            return (MeshUsageError if self.end.fault == "user" else HostError)(self.end.text + more)
        if self.end is None:
            return HostError(f"the mesh was not ready after {timeout_s} s. {log}".strip())
        return HostError(f"the mesh did not start: {self.reason}. {log}".strip())

    def _in_brackets(self) -> str:
        return f" ({self.reason})" if self.reason else ""
