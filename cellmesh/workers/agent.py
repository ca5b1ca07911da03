"""The agent: one process a host that supervises its ranks; the shell round `supervisor.Supervisor`.

It relays between controller and ranks, joins equal answers, watches every process through its pidfd, reads
the ranks' descriptors 1 and 2, and ends everything when told to or when the controller's process ends. It
imports no torch and unpickles nothing.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..errors import HostError, ProtocolError
from ..wire import transport
from ..wire.framing import Frame, Parcel, at_agent_from_controller, at_agent_from_rank, encode
from ..wire.messages import (
    PROTOCOL,
    Channel,
    Hello,
    HostReport,
    Leave,
    LogText,
    ReadHost,
    ReadLog,
    Refused,
    Relay,
    Restart,
    Stop,
    Stopped,
    StreamName,
    Welcome,
)
from ..wire.stream import pack
from ..wire.ticket import Ticket, read_ticket, remove_directory, write_ticket
from . import processes
from .events import Events, Order
from .output import Log, read_log
from .rank_link import Hearing, RankLink
from .supervisor import (
    Action,
    AskToLeave,
    End,
    ForkAll,
    KillRanks,
    Supervisor,
    ToRanks,
    Up,
    join_relays,
)
from .zygote import ZygoteFailed, ZygoteReady
from .zygote_client import ZygoteClient

_MASTER_ADDR = "127.0.0.1"
_LAST_LINES = 40
_LAST_BYTES = 8 * 1024
# faulthandler lists every extension module that is loaded, in one line of 5 kB.
_NOISE = "Extension modules:"


class Agent:
    """One host's agent.

    Args:
        ticket: what to start.

    Raises:
        HostError: a socket cannot be bound.
        OSError: a process cannot be started.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._key = bytes.fromhex(ticket.key)
        self._host = socket.gethostname()
        self._supervisor = Supervisor(ticket.num_ranks, ticket.backend, self._host, time.monotonic())
        self._from_controller = at_agent_from_controller()
        self._from_rank = at_agent_from_rank()
        self._logs = {rank: Log(self._log_path(rank)) for rank in range(ticket.num_ranks)}
        self._links: dict[int, RankLink] = {}
        self._controller: bytes | None = None
        self._controller_pid = 0
        self._dims = ticket.mesh_dim_names, ticket.mesh_shape
        self._num_gpus = 0
        self._store_port = 0
        self._done = False
        self._children: set[int] = set()  # those whose end has a handler of its own
        processes.become_subreaper()
        processes.name_process("cellmesh-agent")

        self._events = Events()
        self._zygote: ZygoteClient | None = self._start_zygote()
        context: zmq.Context[transport.Socket] = zmq.Context()
        self._controllers = transport.bind_router(context, ticket.agent_endpoint)
        self._events.add(int(self._controllers.getsockopt(zmq.FD)), Order.SOCKET, lambda event: None)
        self._events.watch_process(ticket.controller_pid, lambda: self._stop("the notebook's process ended"))
        self._events.watch_signals(
            (signal.SIGTERM, signal.SIGHUP), lambda: self._stop("stopped from outside")
        )
        self._events.watch_signals((signal.SIGCHLD,), self._reap_orphans)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Supervise until the mesh has ended."""
        while not self._done:
            # ZeroMQ's descriptor tells of changes only: whether there is something to read is to be asked.
            waiting = transport.readable(self._controllers)
            self._events.wait(0 if waiting else self._patience_s())
            for frames in transport.drain(self._controllers):
                self._hear_controller(bytes(frames[0]), frames[1:])
            self._act(self._supervisor.tick(time.monotonic()))

    def tell_failure(self, error: Exception) -> None:
        """Tell the controller why the mesh ends, when it is our own fault."""
        reason = f"the agent failed: {type(error).__name__}: {error}"
        self._send_up([Parcel(Stopped(reason))])

    def close(self) -> None:
        """End every process below this one and remove the mesh's directory."""
        for _ in range(50):  # what is killed may have forked in between
            below = processes.descendants(os.getpid())
            if not below:
                break
            processes.kill(below)
            for pid in below:
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:  # a grandchild; it becomes ours in the next round
                    time.sleep(0.001)
        remove_directory(Path(self._ticket.directory))
        self._controllers.close(linger=500)
        self._controllers.context.term()

    def _patience_s(self) -> float | None:
        deadline = self._supervisor.deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToRanks(ranks, channel, frames):
                    self._send_ranks(ranks, channel, frames)
                case Up(parcels):
                    self._send_up(parcels)
                case ForkAll(incarnation):
                    self._fork_all(incarnation)
                case KillRanks(ranks):
                    pids = self._supervisor.pids()
                    processes.kill([pids[rank] for rank in ranks if rank in pids])
                case AskToLeave(ranks):
                    self._send_ranks(ranks, "control", encode([Parcel(Leave())]))
                case End():
                    self._done = True

    # ---- controllers

    def _hear_controller(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            parcels = self._from_controller.decode(frames)
        except ProtocolError:
            return  # whoever it was gets no answer: it need not be one of ours
        actions: list[Action] = []
        for verb, buffers in parcels:
            if type(verb) is Hello:
                self._greet(identity, verb)
            elif identity != self._controller:
                continue
            elif type(verb) is Relay:
                actions += self._supervisor.relay(verb, buffers)
            else:
                self._obey(verb)
        self._act(join_relays(actions))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        if hello.key != self._key:
            return
        if hello.protocol != PROTOCOL:
            refusal = f"the mesh speaks protocol {PROTOCOL}, this controller {hello.protocol}"
        elif self._controller not in (None, identity):
            refusal = f"the mesh is held by process {self._controller_pid}"
        else:
            self._controller, self._controller_pid = identity, hello.pid
            self._send_up(
                [
                    Parcel(Welcome(PROTOCOL, os.getpid(), self._host)),
                    self._supervisor.progress(),
                ]
            )
            return
        transport.send(self._controllers, [identity, *encode([Parcel(Refused(refusal))])])

    def _obey(self, verb: Any) -> None:
        match verb:
            case Restart(names, shape):
                self._dims = (names, shape) if names else self._dims
                self._act(self._supervisor.restart())
            case Stop():
                self._stop("stopped")
            case ReadLog(request, rank, num_bytes):
                text, before = read_log(self._log_path(rank), num_bytes)
                self._send_up([Parcel(LogText(request, text, before))])
            case ReadHost(request):
                rss = {pid: processes.rss_bytes(pid) for pid in self._supervisor.pids().values()}
                self._send_up([Parcel(HostReport(request, self._supervisor.report(rss)))])

    def _send_up(self, parcels: Sequence[Parcel[Any]]) -> None:
        if self._controller is not None:
            transport.send(self._controllers, [self._controller, *encode(parcels)])

    def _stop(self, reason: str) -> None:
        self._act(self._supervisor.stop(reason, time.monotonic()))

    # ---- ranks

    def _send_ranks(self, ranks: Sequence[int], channel: Channel, frames: Sequence[Frame]) -> None:
        packed = pack(frames)
        for rank in ranks:
            link = self._links.get(rank)
            if link is not None:
                link.send(channel, packed)

    def _hear_rank(self, rank: int, frames: Sequence[Frame]) -> None:
        now = time.monotonic()
        for parcel in self._from_rank.decode(frames):
            self._act(self._supervisor.from_rank(rank, parcel, now))

    def _rank_broke(self, rank: int, error: Exception) -> None:
        """User code wrote into one of the rank's sockets: the rest of what it says cannot be trusted."""
        self._logs[rank].append(f"cellmesh: {error}\n")
        self._act([KillRanks((rank,))])

    def _hear_text(self, rank: int, stream: StreamName, text: str) -> None:
        self._logs[rank].append(text)
        self._act(self._supervisor.from_pipe(rank, stream, text, time.monotonic()))

    def _rank_ended(self, rank: int, pid: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            link.finish()
        # What the rank started is in its process group, whose number is safe until the rank is reaped.
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        reason = self._reap(pid)
        if self._zygote is not None:
            self._zygote.forget(pid)
        text, _ = read_log(self._log_path(rank), _LAST_BYTES)
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
        last_output = "\n".join(lines[-_LAST_LINES:])
        self._act(self._supervisor.rank_ended(rank, reason, last_output, time.monotonic()))

    def _log_path(self, rank: int) -> Path:
        return self._ticket.logs / f"rank{rank}.log"

    def _watch_child(self, pid: int, ended: Callable[[], None]) -> None:
        self._children.add(pid)
        self._events.watch_process(pid, ended)

    def _reap(self, pid: int) -> str:
        """Collect an ended child; how it ended, in words."""
        self._children.discard(pid)
        return processes.describe_end(os.waitpid(pid, 0)[1])

    def _reap_orphans(self) -> None:
        """Collect what ranks started and left to us when they ended."""
        processes.reap_children_except(self._children)

    # ---- the zygote and what it forks

    def _start_zygote(self) -> ZygoteClient:
        zygote = ZygoteClient(self._ticket)
        self._events.add(zygote.fileno(), Order.SOCKET, lambda event: self._hear_zygote(zygote))
        self._watch_child(zygote.pid, functools.partial(self._zygote_ended, zygote))
        return zygote

    def _hear_zygote(self, zygote: ZygoteClient) -> None:
        match zygote.receive():
            case ZygoteReady(_, num_gpus, num_threads):
                self._num_gpus = num_gpus
                if num_threads > 1 and self._ticket.preload:
                    self._act(
                        self._supervisor.zygote_failed(
                            f"--preload {','.join(self._ticket.preload)} starts threads ({num_threads - 1}), "
                            "and a process with threads cannot be forked: import that on the ranks instead"
                        )
                    )
                    return
                if num_threads > 1:
                    print(f"the zygote has {num_threads} threads; forks may hang", file=sys.stderr)
                self._act(self._supervisor.zygote_ready(num_gpus))
            case ZygoteFailed(text):
                self._act(self._supervisor.zygote_failed(text))
            case _:
                self._events.remove(zygote.fileno())

    def _zygote_ended(self, zygote: ZygoteClient) -> None:
        self._events.remove(zygote.fileno())
        zygote.close()
        self._zygote = None
        text, _ = read_log(self._ticket.logs / "zygote.log", _LAST_BYTES)
        self._act(self._supervisor.zygote_ended(self._reap(zygote.pid), text))

    def _fork_all(self, incarnation: int) -> None:
        if self._zygote is None:  # it ended since; the new one calls back when it is ready
            self._zygote = self._start_zygote()
            return
        if self._store_port == 0:
            self._fork_store(self._zygote)
        ranks = list(self._logs)
        try:
            links = [self._make_link(rank) for rank in ranks]
        except OSError as error:
            self._act(self._supervisor.fork_failed(f"cannot connect {len(ranks)} ranks: {error}"))
            return
        common = {
            "world_size": len(ranks),
            "num_local_ranks": len(ranks),
            "num_gpus": self._num_gpus,
            "num_threads": processes.num_threads_for(len(ranks)),
            "backend": self._ticket.backend,
            "mesh_dim_names": self._dims[0],
            "mesh_shape": self._dims[1],
            "master_addr": _MASTER_ADDR,
            "master_port": self._store_port,
            "incarnation": incarnation,
            "agent_pid": os.getpid(),
            "mesh_name": self._ticket.name,
        }
        pids = self._zygote.fork_ranks(
            [
                {**common, "rank": rank, "local_rank": rank, "log_path": str(self._log_path(rank))}
                for rank in ranks
            ],
            [link.theirs for link in links],
        )
        for link in links:
            link.close_theirs()
        for rank, pid, link in zip(ranks, pids, links, strict=False):
            link.start()
            self._links[rank] = link
            self._watch_child(pid, functools.partial(self._rank_ended, rank, pid))
        self._act(self._supervisor.forked(dict(zip(ranks, pids, strict=False))))

    def _make_link(self, rank: int) -> RankLink:
        hearing = Hearing(
            text=functools.partial(self._hear_text, rank),
            message=functools.partial(self._hear_rank, rank),
            broken=functools.partial(self._rank_broke, rank),
        )
        return RankLink(self._events, hearing)

    def _fork_store(self, zygote: ZygoteClient) -> None:
        with socket.create_server((_MASTER_ADDR, 0), backlog=1024) as listener:
            self._store_port = listener.getsockname()[1]
            pids = zygote.fork_store(self._store_port, listener.fileno())
        for pid in pids:
            self._watch_child(pid, functools.partial(self._store_ended, pid))

    def _store_ended(self, pid: int) -> None:
        self._store_port = 0
        self._act(self._supervisor.store_ended(self._reap(pid)))


def main(ticket_path: str) -> int:
    """Run an agent.

    Args:
        ticket_path: the mesh's ticket.

    Returns:
        Exit code.
    """
    ticket = read_ticket(Path(ticket_path))
    processes.allow_many_descriptors()
    try:
        agent = Agent(ticket)
    except (HostError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        write_ticket(msgspec.structs.replace(ticket, agent_pid=os.getpid()))
        agent.serve()
    except Exception as error:
        agent.tell_failure(error)
        raise
    finally:
        agent.close()
    return 0
