"""The state of a mesh as its agent reports it, waits for another state, and the errors for users of
an ended mesh.
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


def describe_end(name: str, end: End | None, has_left: bool) -> str:
    """Return a sentence that says that a mesh has ended, and why; "" if it has not."""
    if isinstance(end, Detached):
        return f"this notebook has left {name} ({end.reason})"
    if end is None and not has_left:
        return ""
    return f"{name} has ended{_in_brackets(end)}"


def refuse_use(name: str, end: End | None, state: State) -> NoMeshError:
    """Return the error to raise for work on a mesh that is not ready."""
    if isinstance(end, Detached):
        return NoMeshError(
            f"the mesh lives on without this notebook{_in_brackets(end)}: `%dist_attach {name}` "
            "has it again, with --steal if somebody holds it"
        )
    return NoMeshError(
        f"the mesh is {state}{_in_brackets(end)}: start another with `%dist_start` or "
        "cellmesh.start()"
    )


def explain_start(end: End | None, timeout_s: float, log: str) -> CellmeshError:
    """Return the error to raise for a start that failed or took too long.

    Args:
        end: what ended it.
        timeout_s: how long was waited.
        log: what the agent has said last.
    """
    if end is None:
        return HostError(f"the mesh was not ready after {timeout_s} s. {log}".strip())
    if isinstance(end, StartFailed):
        return MeshUsageError(end.text) if end.fault == "user" else HostError(end.text)
    return HostError(f"the mesh did not start: {reason_of(end)}. {log}".strip())


def reason_of(end: End | None) -> str:
    """Return the reason why a mesh ended, as far as it is known."""
    if end is None:
        return ""
    return end.text if isinstance(end, StartFailed) else end.reason


def _in_brackets(end: End | None) -> str:
    reason = reason_of(end)
    return f" ({reason})" if reason else ""


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
        self.num_ranks = num_ranks
        self._started_at = started_at
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
