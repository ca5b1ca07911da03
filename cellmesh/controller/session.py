"""One mesh's life in this process: its agent's process, the link to it, and the runs in flight."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import HostError, MeshUsageError, NoMeshError, RankDied
from ..wire.framing import Frame
from ..wire.messages import (
    HostReport,
    LogText,
    MeshReady,
    RankInfo,
    RankState,
    Refused,
    StartFailed,
    Stopped,
)
from ..wire.messages import Progress as ProgressVerb
from ..wire.ranks import describe_ranks
from ..wire.ticket import remove_directory
from .core import Change, Core, State
from .launch.local import make_ticket, start_agent
from .link import Link
from .options import Options
from .printer import Printer
from .run import Run
from .sinks import Displays

# The agent gives ranks a second to leave; then everything is killed.
_STOP_S = 5.0
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Progress:
    """How far a start has come."""

    stage: str
    num_ready: int
    num_ranks: int
    elapsed_s: float


class Session:
    """Starts an agent and speaks with it.

    Args:
        options: what to start.
        on_progress: told how far the start has come, on the link's thread.

    Raises:
        HostError: the agent could not be started.
    """

    def __init__(self, options: Options, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.num_ranks = options.num_ranks
        self.dims: Mapping[str, int] = dict(options.mesh)
        self._started_at = time.monotonic()
        self.start_s = 0.0
        self.displays = Displays()
        self._on_progress = on_progress
        self._ticket = make_ticket(options)
        self._owner_pid = os.getpid()
        self._core = Core(options.num_ranks)
        self._state: State = "connecting"
        self._condition = threading.Condition()
        self._runs: dict[int, Run[Any]] = {}
        self._num_runs = 0
        self._num_cells = 0
        self._end: StartFailed | Refused | Stopped | None = None
        self._agent = start_agent(self._ticket)
        self._link = Link(
            self._ticket.agent_endpoint,
            self._ticket.key,
            self._core,
            self._agent.pid,
            self._note_change,
        )
        atexit.register(self.stop)

    # ---- what there is to know

    @property
    def name(self) -> str:
        """The mesh's name."""
        return self._ticket.name

    @property
    def state(self) -> State:
        """Where in its life it is."""
        return self._state

    @property
    def ready_ranks(self) -> tuple[RankInfo, ...]:
        """The ranks as they were when the mesh became ready."""
        return self._core.ranks

    def log_path(self, rank: int) -> Path:
        """A rank's log."""
        return self._ticket.logs / f"rank{rank}.log"

    def busy_ranks(self) -> set[int]:
        """Ranks that have been given work and not ended it."""
        return {rank for run in self._living_runs() for rank in run.waiting_ranks()}

    def runs_on(self, ranks: Iterable[int]) -> list[Run[Any]]:
        """The runs in flight on any of these ranks, oldest first."""
        wanted = set(ranks)
        return [run for run in self._living_runs() if wanted.intersection(run.waiting_ranks())]

    def count_cell(self) -> int:
        """A number for a cell that has none from a notebook."""
        self._num_cells += 1
        return self._num_cells

    # ---- runs and questions

    def start_run(
        self,
        ranks: Sequence[int],
        single: bool,
        printer: Printer,
        title: str,
        frames: Callable[[int], list[Frame]],
        channel: Literal["work", "control"],
        is_cell: bool = False,
    ) -> Run[Any]:
        """Send work to ranks.

        Args:
            ranks: who does it.
            single: see `Run`.
            printer: shows its output.
            title: what to call it.
            frames: the encoded work, given the run's number.
            channel: ``control`` for what busy ranks answer.
            is_cell: see `Run`.

        Raises:
            NoMeshError: the mesh has ended.
            RankDied: one of the ranks is dead.
        """
        self._check_usable(ranks)
        with self._condition:
            self._num_runs += 1
            number = self._num_runs
        run: Run[Any] = Run(number, ranks, single, printer, lambda: self._interrupt(number), title, is_cell)
        work = frames(number)
        self._runs[number] = run
        run.on_end(lambda: self._forget_run(number))
        self._link.start_run(run, lambda core, now: core.submit(number, run.ranks, work, channel))
        return run

    def states(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """What these ranks are doing; waits at most about a second."""
        future = self._link.ask(lambda core, now: core.ask_states(ranks, now))
        return future.result(_ANSWER_S) or {}

    def ask_host(self) -> HostReport | None:
        """The agent's report; None if the mesh has ended."""
        report: HostReport | None = self._link.ask(lambda core, now: core.ask_host()).result(_ANSWER_S)
        return report

    def ask_log(self, rank: int, num_bytes: int) -> LogText | None:
        """The end of a rank's log; None if the mesh has ended."""
        text: LogText | None = self._link.ask(lambda core, now: core.ask_log(rank, num_bytes)).result(
            _ANSWER_S
        )
        return text

    # ---- life

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every rank has answered.

        Raises:
            MeshUsageError: what was asked for cannot work.
            HostError: the mesh did not come up, or not in time.
        """
        try:
            with self._condition:
                settled = self._condition.wait_for(
                    lambda: self.state == "ready" or self._end is not None, timeout_s
                )
        except BaseException:  # Ctrl-C while it starts
            self.stop()
            raise
        self._on_progress = None
        if self.state == "ready":
            return
        end = self._end
        log = self._read_agent_log()
        self.stop()
        if not settled:
            raise HostError(f"the mesh was not ready after {timeout_s} s. {log}".strip())
        if isinstance(end, StartFailed):
            raise MeshUsageError(end.text) if end.fault == "user" else HostError(end.text)
        raise HostError(f"the mesh did not start: {getattr(end, 'reason', end)}. {log}".strip())

    def restart(self, timeout_s: float, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Replace every rank, and wait until the new ones have answered."""
        self._check_usable(())
        self._on_progress = on_progress
        with self._condition:
            self._state = "restarting"
        self._started_at = time.monotonic()
        self._link.post(lambda core, now: core.restart(self.dims))
        self.wait_until_ready(timeout_s)

    def stop(self) -> None:
        """End the mesh: ask its agent, wait for it, and kill it if it does not end."""
        atexit.unregister(self.stop)
        if self._agent.returncode is not None or os.getpid() != self._owner_pid:
            return
        self._link.post(lambda core, now: core.stop())
        try:
            self._agent.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        self._link.close()
        remove_directory(Path(self._ticket.directory))

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return f"<cellmesh {self.name}: {self.num_ranks} ranks ({shape}), {self.state}>"

    # ---- inside

    def _forget_run(self, number: int) -> None:
        self._runs.pop(number, None)

    def _living_runs(self) -> list[Run[Any]]:
        return list(self._runs.copy().values())

    def _check_usable(self, ranks: Sequence[int]) -> None:
        if self.state != "ready":
            reason = getattr(self._end, "reason", "") or getattr(self._end, "text", "")
            raise NoMeshError(
                f"the mesh is {self.state}"
                + (f" ({reason})" if reason else "")
                + ": start another with `%dist_start` or cellmesh.start()"
            )
        dead = [rank for rank in ranks if rank in self._core.dead]
        if dead:
            first = self._core.dead[dead[0]]
            raise RankDied(
                first.rank,
                f"{first.reason}, so nothing can run on {describe_ranks(dead)}. `%dist_restart` replaces all "
                "ranks; `--ranks` runs on the others",
            )

    def _interrupt(self, number: int) -> None:
        with contextlib.suppress(NoMeshError):
            self._link.post(lambda core, now: core.interrupt(number))

    def _note_change(self, change: Change) -> None:
        """The mesh's state changed; called on the link's thread."""
        cause = change.cause
        elapsed_s = time.monotonic() - self._started_at
        if isinstance(cause, MeshReady):
            self.start_s = elapsed_s
        if isinstance(cause, ProgressVerb) and self._on_progress is not None:
            self._on_progress(Progress(cause.stage, cause.num_ready, self.num_ranks, elapsed_s))
        with self._condition:
            self._state = change.state
            if isinstance(cause, StartFailed | Refused | Stopped) and self._end is None:
                self._end = cause
            self._condition.notify_all()

    def _read_agent_log(self) -> str:
        try:
            return (self._ticket.logs / "agent.log").read_text()[-2000:].strip()
        except OSError:
            return ""
