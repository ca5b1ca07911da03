"""Controls one mesh from this process: asks its ranks and agent, heals, leaves and stops it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ...stdlib import time
from ...wire.attach import Detached, Refused, Welcome
from ...wire.hosts import Host
from ...wire.messages import AgentFault, Died, LogText, ReadLog
from ...wire.status import HostReport, Probe, RankState, ReadHost
from ...wire.ticket import Ticket, remove_directory
from ..code_files.sync import CodeSync
from ..core.clocks import ClockOffset
from ..core.core import Change, Core, Effect, HealReport, State
from ..core.mesh_state import HostLost
from ..core.transitions import describe_transitions
from ..kernel import AtExit
from ..live_views import LiveViews
from ..metrics import Metrics
from ..news import Reply
from ..output.cell import Displays
from ..output.console import ConsoleSink, Sink
from ..resizing import ONE_HOST, Resizing, resize
from ..values.pool import SegmentPool
from .hosts.connections import Connections
from .hosts.start import bring_back, describe_replaced, end_unheard, sync_through
from .launch.hosts import describe_detours
from .launch.local import Launcher, describe_full_disk, read_agent_log
from .life import Life, StartProgress
from .link import Link, warn
from .runs import Runs
from .surroundings import OwnSurroundings, fixed_names

# The agent gives ranks a second to leave; then everything is killed.
_STOP_S = 5.0
_ANSWER_S = 5.0


class Session:
    """Controls one mesh through its agent, which this process has started or found.

    Args:
        ticket: the mesh's.
        launcher: of its agent.
        agent_end: a descriptor that can be read once the agent has ended; the link closes it.
        on_progress: told how far the start has come, in the link's loop.
        steal: whether to take the mesh from a controller that holds it.
        sink: shows what was missed while nobody was attached.
        started_at: when it was asked for; None for now.
        is_found: the mesh was there before: it is left, not ended, where waiting for it is given
            up.
        lost: of many hosts, those that are not heard where the mesh was found.

    Attributes:
        name: the mesh's.
        ticket: the mesh's; another one once hosts were replaced, or the mesh resized.
        life: the mesh's state.
        core: decides; used by the link's thread, others only read it.
        runs: of this session.
        num_ranks: of the mesh.
        has_hosts: the mesh was started on hosts by their names: messages travel over a network.
        displays: those of its output that can be updated.
        metrics: what ranks have logged.
        shown: the views of the mesh in this notebook.
        segments: the memory that large values travel in.
        gone_holds: tokens and ranks of values kept for inspections that are gone (`PinnedValue`).
    """

    def __init__(
        self,
        ticket: Ticket,
        launcher: Launcher,
        agent_end: int,
        *,
        on_progress: Callable[[StartProgress], None] | None = None,
        steal: bool = False,
        sink: Sink | None = None,
        is_found: bool = False,
        started_at: float | None = None,
        lost: Sequence[int] = (),
    ) -> None:
        self._is_found = is_found
        self.name, self.ticket = ticket.name, ticket
        self._launcher = launcher
        self.num_ranks = ticket.num_ranks
        self.has_hosts = ticket.spans_hosts
        self.dims: Mapping[str, int] = dict(
            zip(ticket.mesh_dim_names, ticket.mesh_shape, strict=True)
        )
        self.life = Life(ticket.name, self.num_ranks, started_at, on_progress)
        self.metrics, self.shown = Metrics(), LiveViews()
        self.displays = Displays(folds_numbers=ticket.fold_numbers)
        self.segments = SegmentPool(ticket.name)
        self.gone_holds: deque[tuple[str, tuple[int, ...]]] = deque()
        self._sink = sink
        self._hosts = Connections(ticket, steal, lost)  # opened by the link's thread
        self._owner_pid = os.getpid()
        self.core = Core(
            ticket.num_ranks,
            dims=self.dims,
            settle_s=ticket.settle_s,
            on_error=ticket.on_error,
            auto_heal=ticket.auto_heal,
            last_request=secrets.randbits(40),
            num_resizes=ticket.num_resizes,
            layout=ticket.layout,
        )
        self._surroundings = OwnSurroundings.now()  # as the ranks have them
        self._fixed_names = fixed_names(ticket, self._surroundings.environment)
        self._link = Link(self, self.core, agent_end)
        self.runs = Runs(self, self._link, ticket.num_ranks)
        self.code: CodeSync | None = None
        if ticket.roots:
            self.code = sync_through(self._hosts, self._link, ticket)
        self._at_exit = AtExit(self._is_kept, self.stop, self._order_end, self._leave_alive)
        self._link.start(self.runs)  # last, as the agent's first message may need all of the above

    # ---- what there is to know

    @property
    def state(self) -> State:
        """The mesh's state, as "ready"."""
        return self.life.state

    @property
    def dead_ranks(self) -> set[int]:
        """The ranks of the mesh that have no process."""
        return set(self.core.dead)

    def why_dead(self, rank: int) -> str:
        """Return how a dead rank ended, in words."""
        died = self.core.dead.get(rank)
        return died.reason if died is not None else "is dead"

    @property
    def ending(self) -> str:
        """Why the mesh cannot be used any more; "" while it can."""
        return self.life.describe_end()

    def describe_transitions(self) -> list[str]:
        """Return lines that say where the agent runs, and the last changes of runs and heals."""
        agent = f"{self._launcher.describe()}, {'alive' if self._launcher.poll() else 'ended'}"
        return [
            f"agent: {agent}",
            *describe_transitions(self.core.mesh.transitions, time.monotonic()),
        ]

    def describe_ways(self) -> list[str]:
        """Return a line for each host whose agent is not reached straight."""
        return describe_detours(self.ticket.agents)

    # ---- questions

    def ask(
        self,
        question: Callable[[Core, float], tuple[int, Sequence[Effect]]],
        timeout_s: float | None = _ANSWER_S,
    ) -> Any:
        """Have the core ask ranks or the agent, and wait for the answer; None if the mesh ends.

        Raises:
            MeshUsageError: the caller is called by the link's loop.
            HostError: there is no answer in time.
        """
        self._link.check_may_wait()
        try:
            return self._link.ask(question).result(timeout_s)
        except TimeoutError:
            raise HostError(
                f"no answer for {timeout_s:.0f} s ({self._launcher.describe()}): an agent hangs, "
                "or its host is overloaded. Try again; `%dist_stop` ends the mesh whatever hangs"
            ) from None

    def states(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """Ask ranks what they are doing; waits about a second at most."""
        return self.ask(lambda core, now: core.ask(ranks, Probe, now)) or {}

    def ask_host(self) -> HostReport | None:
        """Ask the agent for its report on the mesh's processes; None if the mesh has ended."""
        report: HostReport | None = self.ask(lambda core, now: core.ask_agent(ReadHost))
        return report

    def recovery(self) -> Reply[str | None] | None:
        """Return the coming note on the recovery in progress, "" if there is nothing to say; None
        if none is in progress.
        """
        if not self.core.is_recovering:
            return None
        self._link.check_may_wait()
        return self._link.ask(lambda core, now: core.await_calm())

    def clocks(self, ranks: Iterable[int]) -> dict[int, ClockOffset]:
        """Return the offsets of ranks' clocks (`Connections.clocks`); none on one host."""
        return self._hosts.clocks(ranks)

    def ask_log(self, rank: int, num_bytes: int) -> LogText | None:
        """Ask the agent for the end of a rank's log; None if the mesh has ended."""
        text: LogText | None = self.ask(
            lambda core, now: core.ask_agent(lambda request: ReadLog(request, rank, num_bytes))
        )
        return text

    # ---- life

    def heal(self, new_hosts: str | Iterable[str] = ()) -> HealReport:
        """Replace dead ranks and rebuild groups where needed; Ctrl-C stops waiting for that.

        Args:
            new_hosts: take the place of lost ones (`choose_places`).

        Raises:
            MeshUsageError: a new host cannot take a lost one's place.
            HostError: no lost host could be brought back.
        """
        self.runs.check_usable(())
        why_not, before = "", self.host_names  # why not: some hosts have not been brought back
        if new_hosts and not self.has_hosts:
            raise MeshUsageError(ONE_HOST)
        post, code = self._link.post, self.code
        try:
            why_not = bring_back(self._hosts, self._launcher, post, new_hosts, code)
        finally:
            self.ticket = self._launcher.ticket
        try:
            report = self.ask(lambda core, now: core.heal(now), None)
        except KeyboardInterrupt:
            self.runs.post_if_open(lambda core, now: core.abandon_heal())
            raise
        report = report or HealReport(failure="the mesh has ended")
        notes = (*report.notes, *describe_replaced(before, self.host_names))
        return dataclasses.replace(report, failure=why_not or report.failure, notes=notes)

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names of the mesh's hosts; () for this machine alone."""
        return tuple(agent.name for agent in self.ticket.agents)

    def resize(self, plan: Resizing) -> HealReport:
        """Give the mesh another number of ranks, between runs. Blocks.

        Raises:
            MeshUsageError: ranks run something, or are dead; nothing has changed.
            HostError: a new host cannot be used; nothing has changed.
        """
        self.runs.check_usable(())
        self._link.check_may_wait()
        return resize(
            plan,
            self.core,
            self._link.ask,
            self._link.post,
            self._launcher,
            self._hosts,
            self._note_resized,
            self.code,
        )

    def _note_resized(self, plan: Resizing, new: Sequence[Host]) -> None:
        size, dims = sum(plan.layout), plan.dims
        self._launcher.note_resized(plan.layout, dims, new)
        self.ticket = self._launcher.ticket
        self._hosts.admit()
        self._hosts.tell_agents(self.ticket)
        self.num_ranks = self.life.num_ranks = self.runs.num_ranks = size
        self.dims = dict(dims)

    def reshaped(self, dims: Mapping[str, int]) -> None:
        """Note that the ranks' DeviceMesh has new dims, and post that to the agent."""
        self.dims = dict(dims)
        self.runs.post_if_open(lambda core, now: core.set_dims(dims))

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every rank of the mesh is ready.

        Raises:
            MeshUsageError: what was asked for cannot work.
            HostError: the mesh did not come up, or not in time.
        """
        self.life.wait(lambda: self.life.state == "ready", timeout_s, self._give_up)
        self.life.forget_progress()
        if self.state == "ready":
            return
        log = read_agent_log(self.ticket) or describe_full_disk(self.ticket)
        if isinstance(self.life.end, Refused | Detached):
            self._leave()
            raise NoMeshError(f"{self.name} cannot be attached: {self.life.reason}")
        self._give_up()
        raise self.life.explain_start(timeout_s, log)

    def wait_until_attached(self, timeout_s: float) -> None:
        """Wait until the agent has accepted this controller and described the mesh.

        Raises:
            NoMeshError: it has not, or the mesh has ended.
        """
        settled = self.life.wait(lambda: self.life.state != "connecting", timeout_s, self._leave)
        if self.life.end is None and settled:
            return
        self._leave()
        reason = self.life.reason or (
            f"no answer within {timeout_s:.0f} s ({self._launcher.describe()}). It has ended "
            "(`%dist_start` starts another), or this host does not reach it"
        )
        raise NoMeshError(f"{self.name} cannot be attached: {reason}")

    def restart(
        self, timeout_s: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> str:
        """Replace every rank, and wait until the new ranks are ready.

        Returns:
            What the new ranks take of this process, in a sentence; "" for nothing.

        Raises:
            HostError: a host is lost, or not heard; the ranks are as they were.
        """
        self.runs.check_usable(())
        self._link.check_may_wait()
        self._hosts.check_all_heard()
        before, now = self._surroundings, OwnSurroundings.now()
        changes = before.changes(now, self.ticket, self._fixed_names)
        self.life.restart(on_progress)
        self._surroundings = now
        self._link.post(lambda core, _: core.restart(self.dims, changes))
        self.wait_until_ready(timeout_s)
        return before.describe(changes)

    def stop(self) -> None:
        """End the mesh: ask its agent, wait until the agent ends, and kill it if that is slow."""
        if self.life.has_left or os.getpid() != self._owner_pid:
            return
        self._link.check_may_wait()
        if isinstance(self.life.end, Detached):  # another one's, or nobody's
            self._leave()
            return
        self.runs.post_if_open(lambda core, now: core.stop())
        if self.has_hosts:  # whose processes are seen through their connections only
            self.life.wait(lambda: False, _STOP_S, lambda: None)
        if not self._launcher.wait(_STOP_S):
            if isinstance(self.life.end, Detached):  # it has been stolen
                self._leave()
                return
            self._launcher.signal(signal.SIGKILL)
            self._launcher.wait(None)
        self._leave()
        if left := end_unheard(self._hosts, self._launcher.ticket):
            warn(left)  # the ticket stays: `cellmesh stop` ends them later
        else:
            remove_directory(Path(self.ticket.directory))

    def detach(self) -> None:
        """Leave the mesh to its lease: the ranks live on without a controller.

        Raises:
            NoMeshError: there is nothing to leave.
            MeshUsageError: it has no lease.
            HostError: the agent does not answer.
        """
        self._link.check_may_wait()
        if self.life.end is not None:
            self.runs.check_usable(())
        if self.ticket.lease_s <= 0:
            raise MeshUsageError(
                "this mesh has no lease, so it would end: start it with `--lease 30m` "
                "(cellmesh.start(..., lease_s=1800)), or end it with `%dist_stop`"
            )
        self._link.post(lambda core, now: core.detach())
        if not self.life.wait(lambda: False, _ANSWER_S, lambda: None):
            raise HostError(
                f"the agent ({self._launcher.describe()}) did not answer for {_ANSWER_S} s; "
                "`cellmesh ps` shows its state"
            )
        self._leave()

    def __repr__(self) -> str:
        return f"<cellmesh {self}>"

    def __str__(self) -> str:
        shape = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return f"{self.name}: {self.num_ranks} ranks ({shape}), {self.state}"

    # ---- for the link, on its thread

    def connect(self) -> Connections:
        """Connect to the mesh's agents."""
        self._hosts.open()
        return self._hosts

    def note(self, change: Change) -> None:
        """Note a change of the mesh's state."""
        match cause := change.cause:
            case Welcome():
                if cause.mesh_dim_names:
                    self.dims = dict(zip(cause.mesh_dim_names, cause.mesh_shape, strict=True))
                self.runs.adopt(cause, self._sink or ConsoleSink())
            case Died():
                self.segments.rank_ended(cause.rank)
            case AgentFault():
                warn(cause.text)
            case HostLost():
                warn(cause.describe())
        self.life.note(change)
        if change.state == "restarting":
            self.segments.clear()
        if change.state == "ended":
            self._end_views()

    def note_closed(self) -> None:
        """Handle the link's end: drop the exit handler if another controller holds the mesh."""
        if isinstance(self.life.end, Detached):
            self._at_exit.forget()

    # ---- inside

    def _leave(self) -> None:
        """Close the link and all live views."""
        self._at_exit.forget()
        if not self.life.has_left:
            self.life.has_left = True
            self._link.close()
            self._end_views()
            self._launcher.leave()

    def _end_views(self) -> None:
        """Close the views of a mesh that has ended, or that this notebook has left."""
        self.segments.clear()
        self.shown.end(self.ending)

    def _give_up(self) -> None:
        """End a mesh that did not become ready within the start's time-out."""
        is_left = self._is_found and self.life.end is None
        return self._leave_alive() if is_left else self.stop()

    def _is_kept(self) -> bool:
        return self.ticket.is_lease_chosen or bool(self.runs.busy_ranks())

    def _order_end(self) -> None:
        self.runs.post_if_open(lambda core, now: core.stop())

    def _leave_alive(self) -> None:
        """Leave the mesh to its lease; if it has none, end it."""
        if self.ticket.lease_s > 0 and self.life.end is None:
            with contextlib.suppress(CellmeshError):
                self.detach()
        else:
            self.stop()
