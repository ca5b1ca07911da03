"""The agent: one process per host that supervises the ranks of that host; it carries out the
decisions of `supervisor.Supervisor`.

It relays messages between controller and ranks, merges equal answers, watches every process through
its pidfd, reads the ranks' descriptors 1 and 2, queues messages while no controller is attached,
and ends the mesh on request or when the lease expires, which begins when the controller leaves. It
imports no torch and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import HostError
from ...wire.attach import Detach, SetAgents
from ...wire.codec import Frame, Parcel, encode
from ...wire.curve import public_of
from ...wire.faults import Faults
from ...wire.host import host_name, started_ticks
from ...wire.hosts import ClockReading, Host, PlaceFiles, ReadClock
from ...wire.messages import (
    AgentFault,
    Died,
    Kill,
    LogText,
    MakeStore,
    MeshReady,
    Ranked,
    ReadLog,
    Relay,
    Resize,
    Respawn,
    Restart,
    SetDims,
    Stop,
    Stopped,
    UseStore,
)
from ...wire.peer_calls import Routed
from ...wire.status import HostReport, ReadHost
from ...wire.ticket import Ticket, read_ticket, remove_directory, write_ticket
from ...wire.values import Chunk, Unwanted
from .. import linux_process
from ..rank.stdout import read_log
from .controller_port import ControllerPort, Dims
from .events import Events
from .processes import Processes
from .supervisor import Action, Fork, KillRanks, Supervisor, ToRanks, Up
from .zygote_client import ZygoteClient

if TYPE_CHECKING:
    from .code_files import CodeFiles

# How long to wait before retrying an action that has failed.
_PAUSE_S = 0.1
_NO_NOTEBOOK = (
    "cannot be called, as no notebook is attached to this mesh: calls between hosts go by way of "
    "one (%dist_attach)"
)


class Agent:
    """The agent of one host: starts the mesh's processes on that host, which its ticket (a file of
    the mesh's options) describes, and supervises them.
    """

    def __init__(self, ticket: Ticket, zygote: ZygoteClient) -> None:
        self._ticket, part = ticket, ticket.part
        self._supervisor = Supervisor(
            ticket.ranks,
            ticket.backend,
            part.name or host_name(),
            time.monotonic(),
            is_whole=ticket.host is None,
            owns_store=part.index == 0 and not part.joins,
            joins=part.joins,
        )
        linux_process.become_subreaper()
        linux_process.name_process("cellmesh-agent")

        self._faults = Faults("the mesh's agent", self._report)
        self._num_faults = 0  # number at the end of the loop's last turn
        self._start_error: Exception | None = None  # of the latest action that failed
        self._events = Events(self._faults)
        self._processes = Processes(
            ticket, self._events, self._faults, self._supervisor, self._act, zygote
        )
        self._controller = ControllerPort(
            *(ticket, self._events, self._hear, self._greet, self._stop, self._processes.hear),
            self._note_left,
        )
        self._events.watch_signals(
            (signal.SIGTERM, signal.SIGHUP), lambda: self._stop("stopped from outside")
        )
        self._events.watch_signals((signal.SIGCHLD,), self._processes.reap_orphans)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def address(self) -> Host | None:
        """Address at which controllers on other hosts reach the agent; None in a one-host mesh."""
        part, port = self._ticket.part, self._controller.port
        if not port.is_remote:
            return None
        key = public_of(self._ticket.curve_secret)
        return Host(part.name, port.endpoint, key, part.first_rank, part.num_ranks)

    def serve(self) -> None:
        """Supervise the mesh's processes on this host until the mesh has ended."""
        # An import may fail before the controller has attached: keep serving so that it gets the
        # error.
        controller, supervisor = self._controller, self._supervisor
        patience_s: float | None = 0.0
        while supervisor.state != "ended" or controller.is_awaiting_first(time.monotonic()):
            self._events.wait(0.0 if controller.may_be_readable else patience_s)
            if controller.may_be_readable:
                self._faults.guard(controller.serve)
            patience_s = self._patience_s()
            if patience_s == 0.0 or self._start_error is not None:
                self._tick(time.monotonic())
                patience_s = self._patience_s()
            if supervisor.state == "ended" or self._num_faults != self._faults.num:
                self._num_faults, patience_s = self._faults.num, _PAUSE_S

    def _tick(self, now: float) -> None:
        if (error := self._start_error) is not None:  # else the start would never end
            self._start_error = None
            if self._supervisor.state == "starting":
                self._act(self._supervisor.fail(f"{type(error).__name__}: {error}"))
        try:
            if actions := self._supervisor.tick(now):
                self._act(actions)
        except Exception as error:
            self._faults.take(error)
        try:
            self._controller.tick(now)
        except Exception as error:
            self._faults.take(error)
        if self._controller.may_be_readable:  # something was sent
            self._faults.guard(self._controller.serve)

    def tell_failure(self, error: Exception) -> None:
        """Send the controller an error of the agent itself, which ends the mesh."""
        self._controller.send(
            [Parcel(Stopped(f"the agent failed: {type(error).__name__}: {error}"))]
        )

    def close(self) -> None:
        """End every descendant process, and remove the mesh's directory."""
        self._faults.guard(lambda: linux_process.end_descendants(self._ticket.mark))
        if "_code_files" in vars(self):  # else no files were sent
            self._faults.guard(self._code_files.close)
        remove_directory(Path(self._ticket.directory))
        self._faults.guard(self._controller.close)

    def _report(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # agent.log
        self._controller.send([Parcel(AgentFault(text))])

    def _patience_s(self) -> float | None:
        """Return for how long `_tick` need not be called; None if no time-out runs."""
        due, at = self._supervisor.deadline(), self._controller.deadline()
        due = due if at is None or (due is not None and due < at) else at
        return None if due is None else max(0.0, due - time.monotonic())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            try:
                self._carry_out(action)
            except Exception as error:
                self._faults.take(error)
                self._start_error = error

    def _carry_out(self, action: Action) -> None:
        match action:
            case ToRanks(ranks, channel, frames):
                self._processes.send(ranks, channel, frames)
            case Up(parcels):
                self._controller.send(parcels)
                if not self._controller.is_attached:
                    self._act([*return_unrouted(parcels)])
            case Fork():
                self._controller.note_new(action.ranks)
                self._processes.fork(action)
            case KillRanks(ranks):
                self._processes.kill(ranks)

    # ---- the controller

    def _greet(self) -> tuple[Parcel[Any], Sequence[Died], Dims]:
        state = self._supervisor.progress()
        if isinstance(state.verb, MeshReady):
            where = self._processes.store_address
            state = Parcel(msgspec.structs.replace(state.verb, store_address=where))
        return state, self._supervisor.deaths(), self._processes.dims

    def _hear(self, parcels: Sequence[Parcel[Any]]) -> None:
        actions: list[Action] = []
        for parcel in parcels:
            verb, buffers = parcel
            if type(verb) is Relay:
                self._controller.spool.begin(verb)
                orders = self._admit(parcel) if self._controller.port.is_remote else (parcel,)
                actions += self._processes.relay(orders)
            else:  # keep the order: relay the preceding messages first
                self._act(_join_relays(actions))
                actions = []
                self._faults.guard(self._obey, verb, buffers)
        self._act(_join_relays(actions))

    def _admit(self, parcel: Parcel[Relay]) -> Sequence[Parcel[Relay]]:
        """Return those orders of a controller on another host that can be sent to ranks now; an
        order waits while its value, or that of an earlier order to the same ranks, is still
        arriving.
        """
        arrivals, (order, frames) = self._processes.lending.arrivals, parcel
        if order.channel == "control":
            return [parcel, *(arrivals.interrupt(frames) if arrivals else ())]
        return arrivals.admit(parcel, order.ranks, order.run, order.lends)

    def _take_chunk(self, chunk: Chunk, data: Frame) -> None:
        orders = self._processes.lending.arrivals.take(chunk, data)
        if orders is None:
            self._controller.send([Parcel(Unwanted(chunk.loan))])
        self._controller.acknowledge()  # at once: the controller waits for it
        self._act(self._processes.relay(orders or ()))

    def _note_left(self) -> None:
        """After the controller has left, make ranks fail the calls of other ranks that went by way
        of it, and the runs whose values had not fully arrived from another host.
        """
        self._act([end_routes([*self._supervisor.pids()])])
        why = "the notebook left before the value had arrived: send it again"
        self._act(self._processes.relay(self._processes.lending.arrivals.abandon(why)))
        self._processes.lending.pool.clear()

    def _obey(self, verb: Any, buffers: Sequence[Frame]) -> None:
        match verb:
            case Chunk():
                self._take_chunk(verb, buffers[0])
            case Unwanted(loan):
                self._controller.sender.drop(loan)
            case PlaceFiles():
                self._code_files.handle(verb, buffers)
            case Detach() if self._ticket.lease_s > 0:
                self._controller.dismiss("it was detached")
            case Detach() | Stop():
                self._stop("stopped")
            case Restart(names, shape, changes):
                self._set_dims(names, shape)
                self._processes.change_surroundings(changes)
                self._controller.spool.forget_runs()
                self._processes.lending.pool.clear()
                self._act(self._supervisor.restart())
            case Respawn(ranks):
                self._act(self._supervisor.respawn(ranks, time.monotonic()))
            case Kill(ranks):
                self._act(self._supervisor.kill(ranks))
            case SetDims(names, shape):
                self._set_dims(names, shape)
            case Resize():
                self._resize(verb)
            case UseStore(address, port, incarnation):
                self._processes.store_address = address
                self._supervisor.owns_store = False
                self._act(self._supervisor.use_store(port, incarnation))
            case SetAgents():
                self._controller.agents = verb
            case MakeStore():
                self._processes.make_store()
            case ReadLog(request, rank, num_bytes):
                path, name = self._processes.log_path(rank), self._ticket.part.name
                place = f"{name}:{path}" if name else str(path)
                answer = LogText(request, *read_log(path, num_bytes), place)
                self._controller.send([Parcel(answer)])
            case ReadClock(sent_s):
                self._controller.send([Parcel(ClockReading(sent_s, time.monotonic()))])
            case ReadHost(request):
                at_s, pids = time.monotonic(), self._supervisor.pids().values()
                rss_bytes = {pid: linux_process.rss_bytes(pid) for pid in pids}
                report = self._supervisor.report(rss_bytes)
                preloaded = self._processes.preloaded
                self._controller.send([Parcel(HostReport(request, report, at_s, preloaded))])

    @functools.cached_property
    def _code_files(self) -> CodeFiles:
        from .code_files import CodeFiles, CodeStore  # on many hosts only

        directory = Path(self._ticket.directory) / "code"
        return CodeFiles(
            CodeStore(len(self._ticket.roots), directory),
            self._events,
            lambda answer: self._controller.send([Parcel(answer)]),
            self._processes.import_from,
        )

    def _set_dims(self, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        if not names or (names, shape) == self._processes.dims:
            return
        self._processes.dims = names, shape
        self._ticket = msgspec.structs.replace(self._ticket, mesh_dim_names=names, mesh_shape=shape)
        with contextlib.suppress(HostError):  # the disk is full; the file only informs others
            write_ticket(self._ticket)

    def _resize(self, order: Resize) -> None:
        part = self._ticket.host
        if part is not None:
            num_hosts, num_ranks = len(order.layout), order.layout[part.index]
            part = msgspec.structs.replace(part, num_hosts=num_hosts, num_ranks=num_ranks)
        self._ticket = msgspec.structs.replace(
            self._ticket,
            num_ranks=sum(order.layout),
            num_resizes=order.num_resizes,
            host=part,
            mesh_dim_names=order.mesh_dim_names,
            mesh_shape=order.mesh_shape,
        )
        self._processes.resize(self._ticket)
        self._act(self._supervisor.resize(self._ticket.ranks, time.monotonic()))
        with contextlib.suppress(HostError):  # the disk is full; the file only informs others
            write_ticket(self._ticket)

    def _stop(self, reason: str) -> None:
        self._act(self._supervisor.stop(reason, time.monotonic()))


def _join_relays(actions: Sequence[Action]) -> list[Action]:
    """Join consecutive `ToRanks` actions for the same ranks and channel into one action."""
    if len(actions) < 2:
        return list(actions)
    joined: list[Action] = []
    for action in actions:
        last = joined[-1] if joined else None
        if (
            isinstance(action, ToRanks)
            and isinstance(last, ToRanks)
            and (action.ranks, action.channel) == (last.ranks, last.channel)
        ):
            joined[-1] = ToRanks(last.ranks, last.channel, [*last.frames, *action.frames])
        else:
            joined.append(action)
    return joined


def return_unrouted(parcels: Sequence[Parcel[Any]]) -> Iterator[ToRanks]:
    """Yield the news for each rank that has sent one of these messages to another rank, as no
    controller passes them on.
    """
    for verb, _ in parcels:
        if type(verb) is Ranked and type(verb.verb) is Routed:
            yield _end_route(verb.ranks, verb.verb.mark, verb.verb.rank)


def end_routes(ranks: Sequence[int]) -> ToRanks:
    """Return the news for ranks that nothing that they have sent to others will be answered."""
    return _end_route(ranks, "", -1)


def _end_route(ranks: Sequence[int], mark: str, rank: int) -> ToRanks:
    lost = Routed(mark, rank, why_lost=_NO_NOTEBOOK)
    return ToRanks(tuple(ranks), "control", encode([Parcel(lost)]))


def main(ticket_path: str, zygote: ZygoteClient, announce: Callable[[], None] | None = None) -> int:
    """Run the agent of a mesh in this process; return its exit code.

    Args:
        ticket_path: path of the mesh's ticket.
        zygote: client of the agent's first zygote.
        announce: called once the ticket contains the agent's address, in a mesh on many hosts.
    """
    ticket = msgspec.structs.replace(
        read_ticket(Path(ticket_path)),
        agent_pid=os.getpid(),
        agent_ticks=started_ticks(os.getpid()),
    )
    try:
        agent = Agent(ticket, zygote)
    except (HostError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        if (address := agent.address) is not None:
            ticket = msgspec.structs.replace(ticket, agents=(address,))
        write_ticket(ticket)
        if announce is not None:
            announce()
        agent.serve()
    except Exception as error:
        agent.tell_failure(error)
        raise
    finally:
        agent.close()
    return 0
