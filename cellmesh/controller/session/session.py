"""Controls one mesh from this process: queries its ranks and agents, heals, resizes, restarts and
stops it, and detaches from it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import CellmeshError, HostError, MeshUsageError, NoMeshError
from ...stdlib import time
from ...wire.attach import Detached, Refused, Welcome
from ...wire.hosts import Host
from ...wire.messages import AgentFault, LogText, ReadLog
from ...wire.ranks import in_words
from ...wire.segment_pool import SegmentPool
from ...wire.segments import memfd_name
from ...wire.status import HostReport, Probe, RankState, ReadHost
from ...wire.ticket import Ticket, remove_directory
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
from ..preload import Preloading, describe_left_out
from ..routing import own_router
from .hosts.connections import Connections
from .launch.local import Launcher, describe_full_disk, read_agent_log
from .life import Life, StartProgress
from .link import Link, warn
from .runs import Runs
from .surroundings import OwnSurroundings, describe_changes, fixed_names

if TYPE_CHECKING:
    from ..code_files.sync import CodeSync
    from ..resizing import Resizing

# The agent gives ranks a second to leave; then everything is killed.
_STOP_S = 5.0
_ANSWER_S = 5.0
# Number of uses of segments by the last copies of weights, one a rank and copy.
_MAX_LOANS = 256


class Session:
    """The connection of this process to one mesh, which it has started or attached to: sends
    requests to ranks and agents, and changes or ends the mesh.

    Args:
        ticket: ticket of the mesh.
        launcher: launcher of its agents.
        agent_end: file descriptor that becomes readable at the end of the agent; the link closes
            it.
        on_progress: called with the progress of the start, in the link's loop.
        steal: whether to take the mesh from a controller that holds it.
        sink: shows output that was missed while no controller was attached.
        started_at: when the start was requested, in seconds of the monotonic clock; None for now.
        is_found: whether the mesh existed before: if the wait for it is given up, it is left, not
            ended.
        visits: as for `attach`.
        lost: indices of the hosts that were out of reach when the mesh was found.

    Attributes:
        name: name of the mesh.
        ticket: ticket of the mesh; replaced when hosts are replaced or the mesh is resized.
        life: state of the mesh.
        core: the state machine of the controller; other threads than the link's only read it.
        runs: runs of this session.
        num_ranks: number of ranks of the mesh.
        has_hosts: whether the mesh was started on hosts by name, so that messages travel over a
            network.
        displays: displays in its output that can be updated.
        metrics: values that ranks have logged.
        shown: views of the mesh in this notebook.
        check_size: called with the new number of ranks before a resize.
        segments: shared memory for large values.
        copies: numbers of the copies from other ranks to this mesh that are under way.
        ended_loans: numbers of the uses of segments of this mesh's ranks by copies that have ended
            (`wire.weights.GiveTensors`).
        actors: the actors of the mesh, by name (`controller.actors.Spawned`).
        supervisor: makes some of them again on new ranks (`controller.supervision.Supervisor`);
            None until there are some.
        links: process groups with ranks of other meshes, by name.
        router: passes messages on between its ranks and others.
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
        visits: bool = False,
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
        self.preloading = Preloading(ticket.learned_list, max(1, len(ticket.agents)))
        self.metrics, self.shown = Metrics(), LiveViews()
        self.check_size: Callable[[int], None] = lambda num_ranks: None
        self.displays = Displays(folds_numbers=ticket.fold_numbers)
        self.segments = SegmentPool(memfd_name(ticket.name))
        self.copies: set[int] = set()
        self.ended_loans = collections.deque[int](maxlen=_MAX_LOANS)
        self.actors: dict[str, Any] = {}
        self.links: dict[str, Any] = {}  # of `links.MeshLink`
        self.supervisor: Any = None
        self.router = own_router().add(self)
        self._sink = sink
        self._hosts = Connections(ticket, steal, lost, self.segments, visits)  # opened by the link
        self._owner_pid = os.getpid()
        self.core = Core(
            ticket.num_ranks,
            dims=self.dims,
            settle_s=ticket.settle_s,
            auto_heal=ticket.auto_heal,
            last_request=int.from_bytes(os.urandom(5)),
            num_resizes=ticket.num_resizes,
            layout=ticket.layout,
        )
        self._surroundings = OwnSurroundings.now()  # as the ranks have them
        self._fixed_names = fixed_names(ticket, self._surroundings.environment)
        self._link = Link(self, self.core, agent_end)
        self.runs = Runs(self, self._link, ticket.num_ranks)
        self.code: CodeSync | None = None
        if ticket.roots:
            from .hosts.start import sync_through

            self.code = sync_through(self._hosts, self._link, ticket)
        self._at_exit = AtExit(self._is_kept, self.stop, self._order_end, self._leave_alive)
        self._link.start(self.runs)  # last, as the agent's first message may need all of the above

    # ---- state

    @property
    def state(self) -> State:
        """The state of the mesh, e.g. ``ready``."""
        return self.life.state

    @property
    def dead_ranks(self) -> set[int]:
        """The ranks of the mesh that have no process."""
        return set(self.core.dead)

    def why_dead(self, rank: int) -> str:
        """Return how a dead rank has ended, as a text for users."""
        died = self.core.dead.get(rank)
        return died.reason if died is not None else "is dead"

    @property
    def ending(self) -> str:
        """A sentence on why the mesh cannot be used any more; "" while it can be used."""
        return self.life.describe_end()

    def describe_transitions(self) -> list[str]:
        """Return lines on the agent's process and on the latest state transitions of runs and of
        recoveries from failures.
        """
        return [
            f"agent: {self._launcher.describe()}",
            *self._describe_preloaded(),
            *describe_transitions(tuple(self.core.mesh.transitions), time.monotonic()),
        ]

    def _describe_preloaded(self) -> list[str]:
        report, path = self.ask_host(), self.ticket.learned_list
        text = report.preloaded if report is not None else ""
        given = f"; --preload {','.join(self.ticket.preload)}" if self.ticket.preload else ""
        kept = f"{given}; learned in {path}" if path else given
        return [
            (text or "nothing was imported before the fork but torch") + kept,
            *describe_left_out(path),
        ]

    # ---- requests

    def watch(self, watched: socket.socket, ready: Callable[[], bool]) -> None:
        """Have the link's thread watch a socket (`Link.watch`)."""
        self._link.watch(watched, ready)

    def ask(
        self,
        question: Callable[[Core, float], tuple[int, Sequence[Effect]]],
        timeout_s: float | None = _ANSWER_S,
    ) -> Any:
        """Send a request to ranks or the agent, and return the answer; None if the mesh ends.

        Args:
            question: calls the method of the core that sends the request.
            timeout_s: time limit of the answer in seconds; None for none.

        Raises:
            MeshUsageError: the caller is a callback in the link's loop.
            HostError: no answer arrives in time.
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
        """Ask ranks for the states of their main threads, and return the answers; waits about a
        second at most.
        """
        return self.ask(lambda core, now: core.ask(ranks, Probe, now)) or {}

    def ask_host(self) -> HostReport | None:
        """Ask the agent for its report on the mesh's processes; None if the mesh has ended."""
        report: HostReport | None = self.ask(lambda core, now: core.ask_agent(ReadHost))
        return report

    def recovery(self) -> Reply[str | None] | None:
        """Return a reply that will hold the note on the mesh's recovery from a failure, or ""; None
        if the mesh does not recover from one now.
        """
        if not self.core.is_recovering:
            return None
        self._link.check_may_wait()
        return self._link.ask(lambda core, now: core.await_calm())

    def clocks(self, ranks: Iterable[int]) -> dict[int, ClockOffset]:
        """Return the offset of the clock of each rank's host from this host's; empty for a mesh on
        one host.
        """
        return self._hosts.clocks(ranks)

    def ask_log(self, rank: int, num_bytes: int) -> LogText | None:
        """Ask the agent for the end of a rank's log; None if the mesh has ended."""
        text: LogText | None = self.ask(
            lambda core, now: core.ask_agent(lambda request: ReadLog(request, rank, num_bytes))
        )
        return text

    # ---- life

    def heal(self, new_hosts: str | Iterable[str] = ()) -> HealReport:
        """Replace dead ranks and rebuild process groups where needed; Ctrl-C abandons the heal.

        Args:
            new_hosts: hosts that take the place of lost ones (`choose_places`).

        Raises:
            MeshUsageError: a new host cannot take a lost one's place.
            HostError: no lost host could be brought back.
        """
        self.runs.check_usable(())
        if new_hosts and not self.has_hosts:
            from ..resizing import ONE_HOST

            raise MeshUsageError(ONE_HOST)
        why_not, report = self._heal_once(new_hosts)
        if report.failure and not why_not and self._hosts.lost:
            # A host that was reached again, and taken back, is lost again: it is started.
            respawned = report.respawned
            why_not, report = self._heal_once()
            respawned = tuple(sorted({*respawned, *report.respawned}))
            report = msgspec.structs.replace(report, respawned=respawned)
        # Some hosts may still be lost.
        return msgspec.structs.replace(report, failure=why_not or report.failure)

    def _await_links(self) -> bool:
        """Wait until ranks that are busy only with links have connected them; return whether there
        were such ranks.
        """
        return not self.runs.busy_ranks() and any(each.await_tries() for each in self._links())

    def _heal_once(self, new_hosts: str | Iterable[str] = ()) -> tuple[str, HealReport]:
        from .hosts.start import bring_back

        post = self._link.post
        try:
            why_not = bring_back(self._hosts, self._launcher, post, new_hosts, self.code)
        finally:
            self.ticket = self._launcher.ticket
        try:
            self._await_links()
            report = self.ask(lambda core, now: core.heal(now), None)
            while report is not None and report.failure and self._await_links():
                report = self.ask(lambda core, now: core.heal(now), None)
        except KeyboardInterrupt:
            self.runs.post_if_open(lambda core, now: core.abandon_heal())
            raise
        return why_not, report or HealReport(failure="the mesh has ended")

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names of the mesh's hosts; () for a mesh on this machine alone."""
        return tuple(agent.name for agent in self.ticket.agents)

    def resize(self, plan: Resizing) -> HealReport:
        """Change the number of ranks of the mesh, between runs. Blocks.

        Args:
            plan: new numbers of ranks of the hosts, and dims of the DeviceMesh.

        Raises:
            MeshUsageError: ranks execute a run, or are dead; nothing has changed.
            HostError: a new host cannot be used; nothing has changed.
        """
        self.runs.check_usable(())
        self._link.check_may_wait()
        self.check_size(sum(plan.layout))
        from ..resizing import resize

        self._await_links()
        while True:
            try:
                return resize(
                    plan,
                    self.core,
                    self._link.ask,
                    self._link.post,
                    self._launcher,
                    self._hosts,
                    self._note_resized,
                    self.code,
                    self.states,
                )
            except MeshUsageError:
                if not self._await_links():
                    raise

    def _note_resized(self, plan: Resizing, new: Sequence[Host]) -> None:
        size, dims = sum(plan.layout), plan.dims
        self._launcher.note_resized(plan.layout, dims, new)
        self.ticket = self._launcher.ticket
        self._hosts.tell_agents(self.ticket)
        self.router.note_resized(self, size)
        self.num_ranks = self.life.num_ranks = self.runs.num_ranks = size
        self.dims = dict(dims)

    def reshaped(self, dims: Mapping[str, int]) -> None:
        """Record new dims of the ranks' DeviceMesh, and send them to the agent."""
        self.dims = dict(dims)
        self.runs.post_if_open(lambda core, now: core.set_dims(dims))

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every rank of the mesh is ready.

        Raises:
            MeshUsageError: the mesh cannot start with these options.
            HostError: the mesh did not start, or not in time.
            NoMeshError: its agent has refused or dropped this controller.
        """
        self.life.wait(lambda: self.life.state == "ready", timeout_s, self._give_up)
        self.life.forget_progress()
        if self.state == "ready":
            return
        log = read_agent_log(self.ticket) or describe_full_disk(self.ticket)
        if isinstance(self.life.end, Refused | Detached):
            self._leave()
            raise NoMeshError(f"{self.name} cannot be attached: {self.life.reason}")
        error = self.life.explain_start(timeout_s, log)  # before the stop, which is an end too
        self._give_up()
        raise error

    def wait_until_attached(self, timeout_s: float) -> None:
        """Wait until the agent has accepted this controller and described the mesh.

        Raises:
            NoMeshError: the agent has not accepted it in time, or the mesh has ended.
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
            A sentence on the changes of this process that new ranks take over; "" for none.

        Raises:
            HostError: a host is lost or out of reach; the ranks are unchanged.
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
        return describe_changes(changes)

    def stop(self, *, is_hurried: bool = False) -> None:
        """End the mesh: ask its agent to end, wait for its end, and kill it if that is slow.

        Args:
            is_hurried: whether it suffices that all other processes of the mesh have ended, as the
                agent reports them.
        """
        if self.life.has_left or os.getpid() != self._owner_pid:
            return
        self._link.check_may_wait()
        if isinstance(self.life.end, Detached):  # another controller may hold it
            self._leave()
            return
        self.runs.post_if_open(lambda core, now: core.stop())
        has_ended = False
        if self.has_hosts or is_hurried:  # processes of other hosts are seen through connections
            has_ended = self.life.wait(lambda: False, _STOP_S, lambda: None) and is_hurried
        if not (has_ended or self._launcher.wait(_STOP_S)):
            if isinstance(self.life.end, Detached):  # it has been stolen
                self._leave()
                return
            self._launcher.signal(signal.SIGKILL)
            self._launcher.wait(None)
        if self.has_hosts:  # a host out of reach confirms nothing: its runs end here
            self.runs.post_if_open(lambda core, now: core.agent_ended("stopped"))
        self._leave()
        from .hosts.start import end_unheard

        if left := end_unheard(self._hosts, self._launcher.ticket):
            warn(left)  # the ticket stays: `cellmesh stop` ends them later
        else:
            remove_directory(Path(self.ticket.directory))

    def detach(self) -> None:
        """Detach from the mesh: its ranks run on without a controller for the time of its lease.

        Raises:
            NoMeshError: the mesh has ended.
            MeshUsageError: the mesh has no lease.
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
        if (recovery := self.recovery()) is not None:
            recovery.wait(_ANSWER_S)  # else ranks would never receive the runs that wait for it
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
        shape = shape or "no process group"
        return f"{self.name}: {in_words(self.num_ranks)} ({shape}), {self.state}"

    # ---- for the link, on its thread

    def connect(self) -> Connections:
        """Connect to the mesh's agents."""
        self._hosts.open()
        return self._hosts

    def note(self, change: Change) -> None:
        """Handle a change of the mesh's state."""
        match cause := change.cause:
            case Welcome():
                if cause.mesh_dim_names:
                    self.dims = dict(zip(cause.mesh_dim_names, cause.mesh_shape, strict=True))
                self.runs.adopt(cause, self._sink or ConsoleSink())
            case AgentFault():
                warn(cause.text, self.name)
            case HostLost():
                warn(cause.describe(), self.name)
        self.life.note(change)
        for actor in [*self.actors.values()]:
            actor.note(change)
        for link in self._links():
            link.note(self.name, change)
        if self.supervisor is not None:
            self.supervisor.note(change)
        self.router.note(self, change)
        if change.state == "restarting":
            self.segments.clear()
            self.actors.clear()
        if change.state == "ended":
            self._end_views()

    def note_closed(self) -> None:
        """After the end of the link's thread, remove the exit handler if this process has detached
        from the mesh.
        """
        if isinstance(self.life.end, Detached):
            self._at_exit.forget()

    # ---- inside

    def _links(self) -> list[Any]:
        return [*self.links.values()]

    def _leave(self) -> None:
        """Close the link to the agents, and all live views of the mesh."""
        self._at_exit.forget()
        if not self.life.has_left:
            self.life.has_left = True
            self._link.close()
            self._end_views()
            self._launcher.leave()

    def _end_views(self) -> None:
        """Close the live views of the mesh, as it has ended or this notebook has left it."""
        self.segments.clear()
        self.shown.end(self.ending)

    def _give_up(self) -> None:
        """End a mesh that was not ready in time; detach instead if this process had attached to the
        mesh.
        """
        is_left = self._is_found and self.life.end is None
        return self._leave_alive() if is_left else self.stop()

    def _is_kept(self) -> bool:
        return self.ticket.is_lease_chosen or self.runs.has_user_code

    def _order_end(self) -> None:
        self.runs.post_if_open(lambda core, now: core.stop())

    def _leave_alive(self) -> None:
        """Detach from the mesh, whose ranks run on for the time of its lease; end a mesh without a
        lease.
        """
        if self.ticket.lease_s > 0 and self.life.end is None:
            with contextlib.suppress(CellmeshError):
                self.detach()
        else:
            self.stop()
