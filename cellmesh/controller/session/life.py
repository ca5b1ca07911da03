"""The life of a mesh as its agent reports it: its state and end, waits for another state, and the
errors for users of a mesh that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ...stdlib import time
from ...wire.attach import Detached, Refused
from ...wire.messages import MeshReady, StartFailed, Stopped
from ...wire.messages import Progress as ProgressVerb
from ..core.core import Change, State
from ..news import News

# Why there is no more to be done with a mesh.
End = StartFailed | Refused | Detached | Stopped


@dataclass(frozen=True)
class StartProgress:
    """The stage of a mesh's start or restart, and how many ranks are ready.

    Attributes:
        stage: what is being done, in words.
        num_ready: ranks that have answered.
        num_ranks: of how many.
        elapsed_s: since it began, in seconds.
    """

    stage: str
    num_ready: int
    num_ranks: int
    elapsed_s: float


class Life:
    """The state of one mesh (starting, ready, ended), for which threads can wait.

    Args:
        name: the mesh's.
        num_ranks: of the mesh.
        started_at: when the mesh was asked for, in seconds; None for now.
        on_progress: called in the link's loop with how far the start has come.

    Attributes:
        state: where the mesh is.
        end: why there is no more to be done with the mesh; None as long as there is.
        has_left: whether the session has left the mesh.
        start_s: how long the last start took, in seconds.
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
        """Note that all ranks are about to be replaced, and who is shown the progress."""
        self._on_progress = on_progress
        self.state = "restarting"
        self._started_at = time.monotonic()

    def note(self, change: Change) -> None:
        """Note a new state of the mesh, and wake the threads that wait for it; called in the link's
        loop.
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
            is_there: whether to wait no longer.
            timeout_s: how long, in seconds.
            give_up: called where Ctrl-C ends the wait.
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
        """Return whether the mesh has ended or the session has left it."""
        return self.end is not None or self.has_left

    @property
    def reason(self) -> str:
        """Why the mesh has ended, as far as it is known; "" if it has not."""
        if self.end is None:
            return ""
        return self.end.text if isinstance(self.end, StartFailed) else self.end.reason

    def describe_end(self) -> str:
        """Return a sentence that says that the mesh has ended, and why; "" if it has not."""
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
            f"the mesh is {self.state}{self._in_brackets()}: start another with `%dist_start` or "
            "cellmesh.start()"
        )

    def explain_start(self, timeout_s: float, log: str) -> CellmeshError:
        """Return the error to raise for a start that failed or took too long.

        Args:
            timeout_s: how long was waited.
            log: what the agent has said last.
        """
        if isinstance(self.end, StartFailed):
            return (MeshUsageError if self.end.fault == "user" else HostError)(self.end.text)
        if self.end is None:
            return HostError(f"the mesh was not ready after {timeout_s} s. {log}".strip())
        return HostError(f"the mesh did not start: {self.reason}. {log}".strip())

    def _in_brackets(self) -> str:
        return f" ({self.reason})" if self.reason else ""
