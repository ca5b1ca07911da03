"""The agent: one process a host that supervises its ranks; the shell round `supervisor.Supervisor`.

It relays between controller and ranks, joins equal answers, watches every process through its pidfd, reads
the ranks' descriptors 1 and 2, and ends everything when told to or when the controller's process ends. It
imports no torch and unpickles nothing.
"""

from __future__ import annotations

import codecs
import functools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..errors import HostError, ProtocolError
from ..wire import transport
from ..wire.framing import (
    Frame,
    Parcel,
    at_agent_from_controller,
    at_agent_from_rank,
    encode,
)
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
    StreamName,
    Welcome,
)
from ..wire.stream import QueuedChannel
from ..wire.ticket import Ticket, read_ticket, remove_directory, write_ticket
from . import processes
from .output import Log, read_log
from .supervisor import Action, AskToLeave, End, ForkAll, KillRanks, Supervisor, ToRanks, Up
from .zygote import (
    MAX_RANKS_A_MESSAGE,
    Forget,
    Forked,
    ForkRanks,
    ForkStore,
    Reply,
    ZygoteFailed,
    ZygoteReady,
)

_PIPE_BYTES = 64 * 1024
_LAST_LINES = 8
_MAX_EVENTS = 4096
_FORK_S = 20.0
_MASTER_ADDR = "127.0.0.1"


@dataclass
class _Pipe:
    rank: int
    stream: StreamName
    decoder: Any = field(default_factory=codecs.getincrementaldecoder("utf-8"))


@dataclass(frozen=True)
class _RankLink:
    rank: int
    channel: QueuedChannel


@dataclass(frozen=True)
class _RankEnds:
    """What connects agent and rank: two pipes, (read, write), and two socketpairs, (ours, theirs)."""

    out: tuple[int, int]
    err: tuple[int, int]
    work: tuple[socket.socket, socket.socket]
    control: tuple[socket.socket, socket.socket]

    def theirs(self) -> tuple[int, int, int, int]:
        return self.out[1], self.err[1], self.work[1].fileno(), self.control[1].fileno()

    def close_theirs(self) -> None:
        os.close(self.out[1])
        os.close(self.err[1])
        self.work[1].close()
        self.control[1].close()


class Agent:
    """One host's agent.

    Args:
        ticket: what to start.

    Raises:
        HostError: a socket cannot be bound or a process not started.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._key = bytes.fromhex(ticket.key)
        self._host = socket.gethostname()
        self._supervisor = Supervisor(ticket.num_ranks, ticket.backend, self._host, time.monotonic())
        processes.become_subreaper()
        processes.name_process("cellmesh-agent")

        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._links: dict[int, _RankLink] = {}
        self._channels: dict[tuple[int, Channel], QueuedChannel] = {}
        self._incarnation = 0
        self._num_gpus = 0
        self._controller: bytes | None = None
        self._controller_pid = 0
        self._done = False

        self._start_zygote()
        context: zmq.Context[transport.Socket] = zmq.Context()
        self._controllers = transport.bind_router(context, ticket.agent_endpoint)
        self._from_controller = at_agent_from_controller()
        self._from_rank = at_agent_from_rank()
        self._logs = {rank: Log(ticket.logs / f"rank{rank}.log") for rank in range(ticket.num_ranks)}
        self._watch_process(ticket.controller_pid, self._controller_ended)
        self._watch_signals()

    # ---- the loop

    def serve(self) -> None:
        """Supervise until the mesh has ended."""
        controllers = self._controllers
        self._epoll.register(int(controllers.getsockopt(zmq.FD)), select.EPOLLIN)
        while not self._done:
            patience_s = 0 if transport.readable(controllers) else self._patience_s()
            events = self._epoll.poll(patience_s, _MAX_EVENTS)
            # What a rank wrote before it answered is in its pipe by the time the answer is here: pipes first.
            for number, _ in events:
                if number in self._pipes:
                    self._read_pipe(number)
            for number, event in events:
                if number in self._links:
                    self._serve_rank(self._links[number], event)
            for number, _ in events:
                if number in self._handlers:
                    self._handlers[number]()
            for frames in transport.drain(controllers):
                self._hear_controller(bytes(frames[0]), frames[1:])
            self._act(self._supervisor.tick(time.monotonic()))

    def _patience_s(self) -> float | None:
        deadline = self._supervisor.deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ForkAll(incarnation):
                    self._fork_all(incarnation)
                case KillRanks(ranks):
                    pids = self._supervisor.pids()
                    for rank in ranks:
                        if rank in pids:
                            processes.kill([pids[rank]])
                case AskToLeave(ranks):
                    self._send_ranks(ranks, "control", encode([Parcel(Leave())]))
                case ToRanks(ranks, channel, frames):
                    self._send_ranks(ranks, channel, frames)
                case Up(parcels):
                    self._send_up(parcels)
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
        self._act(_join(actions))

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
            case Restart():
                self._act(self._supervisor.restart())
            case Stop():
                self._stop("stopped")
            case ReadLog(request, rank, num_bytes):
                text, before = read_log(self._ticket.logs / f"rank{rank}.log", num_bytes)
                self._send_up([Parcel(LogText(request, text, before))])
            case ReadHost(request):
                rss = {pid: processes.rss_bytes(pid) for pid in self._supervisor.pids().values()}
                self._send_up([Parcel(HostReport(request, self._supervisor.report(rss)))])

    def _send_up(self, parcels: Sequence[Parcel[Any]]) -> None:
        if self._controller is not None:
            transport.send(self._controllers, [self._controller, *encode(parcels)])

    def _controller_ended(self) -> None:
        self._stop("the notebook's process ended")

    def _stop(self, reason: str) -> None:
        self._act(self._supervisor.stop(reason, time.monotonic()))

    # ---- ranks

    def _serve_rank(self, link: _RankLink, event: int) -> None:
        if event & select.EPOLLOUT and link.channel.flush():
            self._epoll.modify(link.channel.connection.fileno(), select.EPOLLIN)
        if not event & ~select.EPOLLOUT:
            return
        messages = link.channel.read()
        if not messages and event & select.EPOLLHUP:
            self._close_link(link)  # the rank ends; its pidfd tells how
        now = time.monotonic()
        for frames in messages:
            for parcel in self._from_rank.decode(frames):
                self._act(self._supervisor.from_rank(link.rank, parcel, now))

    def _send_ranks(self, ranks: Sequence[int], channel: Channel, frames: Sequence[Frame]) -> None:
        for rank in ranks:
            link = self._channels.get((rank, channel))
            if link is not None and not link.send(frames):
                self._epoll.modify(link.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _close_link(self, link: _RankLink) -> None:
        self._epoll.unregister(link.channel.connection.fileno())
        del self._links[link.channel.connection.fileno()]
        self._channels = {k: c for k, c in self._channels.items() if c is not link.channel}
        link.channel.connection.close()

    def _rank_ended(self, rank: int, pid: int) -> None:
        for number in [n for n, pipe in self._pipes.items() if pipe.rank == rank]:
            self._read_pipe(number, to_the_end=True)
        for link in [link for link in self._links.values() if link.rank == rank]:
            while link.channel.connection.fileno() in self._links:  # its last words, to their end
                self._serve_rank(link, select.EPOLLIN | select.EPOLLHUP)
        # What the rank started is in its process group, whose number is safe until the rank is reaped.
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        reason = _reap(pid)
        self._tell_zygote(Forget(pid))
        text, _ = read_log(self._ticket.logs / f"rank{rank}.log", _PIPE_BYTES // 8)
        lines = [line for line in text.splitlines() if line.strip()]
        last_output = "\n".join(lines[-_LAST_LINES:])
        self._act(self._supervisor.rank_ended(rank, reason, last_output, time.monotonic()))

    def _read_pipe(self, number: int, to_the_end: bool = False) -> None:
        pipe = self._pipes[number]
        while True:
            try:
                data = os.read(number, _PIPE_BYTES)
            except BlockingIOError:
                data = b""
                if not to_the_end:
                    return
            text = pipe.decoder.decode(data, final=not data)
            if text:
                self._logs[pipe.rank].append(text)
                self._act(self._supervisor.from_pipe(pipe.rank, pipe.stream, text, time.monotonic()))
            if not data:
                self._epoll.unregister(number)
                del self._pipes[number]
                os.close(number)
                return
            if not to_the_end:
                return

    # ---- processes

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        log = os.open(self._ticket.logs / "zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # One thread: OpenBLAS starts its pool when numpy is imported, unless told not to.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pid = os.posix_spawn(
            sys.executable,
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
                "from cellmesh.workers.zygote import main; main(int(sys.argv[1]), sys.argv[2])",
                str(theirs.fileno()),
                str(self._ticket.path),
            ],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
        )
        os.close(log)
        theirs.close()
        self._zygote, self._zygote_pid = ours, pid
        self._store_port = 0
        self._handlers[ours.fileno()] = self._hear_zygote
        self._epoll.register(ours.fileno(), select.EPOLLIN)
        self._watch_process(pid, functools.partial(self._zygote_ended, pid))

    def _hear_zygote(self) -> None:
        data = self._zygote.recv(1 << 20)
        if not data:
            self._forget(self._zygote.fileno())
            return
        match msgspec.msgpack.decode(data, type=Reply):
            case ZygoteReady(_, num_gpus, num_threads):
                self._num_gpus = num_gpus
                if num_threads > 1:
                    print(f"the zygote has {num_threads} threads; forks may hang", file=sys.stderr)
                self._act(self._supervisor.zygote_ready(num_gpus))
            case ZygoteFailed(text):
                self._act(self._supervisor.zygote_failed(text))
            case Forked():
                raise ProtocolError("the zygote answered a question that was not asked")

    def _tell_zygote(self, message: Any, descriptors: Sequence[int] = ()) -> bool:
        try:
            socket.send_fds(self._zygote, [msgspec.msgpack.encode(message)], list(descriptors))
        except OSError:  # it has ended; its pidfd tells
            return False
        return True

    def _ask_zygote(self, message: Any, descriptors: Sequence[int]) -> list[int]:
        """Have processes forked; waits, as a fork takes milliseconds and nothing can be done before."""
        if not self._tell_zygote(message, descriptors):
            return []
        try:
            self._zygote.settimeout(_FORK_S)
            data = self._zygote.recv(1 << 20)
        except TimeoutError:  # it hangs: its end will be noticed and reported
            processes.kill([self._zygote_pid])
            return []
        return msgspec.msgpack.decode(data, type=Forked).pids if data else []

    def _zygote_ended(self, pid: int) -> None:
        reason = _reap(pid)
        text, _ = read_log(self._ticket.logs / "zygote.log", 2000)
        self._act(self._supervisor.zygote_ended(reason, text))
        self._zygote_pid = 0

    def _fork_all(self, incarnation: int) -> None:
        self._incarnation = incarnation
        if self._zygote_pid == 0:  # it ended since; a new one calls back when it is ready
            self._forget(self._zygote.fileno())
            self._zygote.close()
            self._start_zygote()
            return
        if self._store_port == 0:
            self._fork_store()
        ranks = list(self._logs)
        for start in range(0, len(ranks), MAX_RANKS_A_MESSAGE):
            self._fork_ranks(ranks[start : start + MAX_RANKS_A_MESSAGE])

    def _fork_store(self) -> None:
        with socket.create_server((_MASTER_ADDR, 0), backlog=1024) as listener:
            self._store_port = listener.getsockname()[1]
            pids = self._ask_zygote(ForkStore(self._store_port, os.getpid()), [listener.fileno()])
        for pid in pids:
            self._watch_process(pid, functools.partial(self._store_ended, pid))

    def _store_ended(self, pid: int) -> None:
        self._store_port = 0
        self._act(self._supervisor.store_ended(_reap(pid)))

    def _fork_ranks(self, ranks: Sequence[int]) -> None:
        ends = [_RankEnds(os.pipe(), os.pipe(), socket.socketpair(), socket.socketpair()) for _ in ranks]
        theirs = [number for own in ends for number in own.theirs()]
        pids = self._ask_zygote(
            ForkRanks([msgspec.Raw(msgspec.msgpack.encode(self._options(rank))) for rank in ranks]),
            theirs,
        )
        for own in ends:
            own.close_theirs()
        if not pids:
            return
        for rank, pid, own in zip(ranks, pids, ends, strict=True):
            self._add_pipe(own.out[0], _Pipe(rank, "stdout"))
            self._add_pipe(own.err[0], _Pipe(rank, "stderr"))
            self._add_link(rank, "work", own.work[0])
            self._add_link(rank, "control", own.control[0])
            self._watch_process(pid, functools.partial(self._rank_ended, rank, pid))
        self._act(self._supervisor.forked(dict(zip(ranks, pids, strict=True))))

    def _options(self, rank: int) -> dict[str, Any]:
        """`rank.RankOptions` of a rank; as a dict, since that module imports torch."""
        ticket = self._ticket
        told = os.environ.get("OMP_NUM_THREADS", "")
        default = 1 if ticket.num_ranks > 1 else len(os.sched_getaffinity(0))
        return {
            "rank": rank,
            "local_rank": rank,
            "world_size": ticket.num_ranks,
            "num_local_ranks": ticket.num_ranks,
            "num_gpus": self._num_gpus,
            "num_threads": int(told) if told.isdecimal() else default,
            "backend": ticket.backend,
            "mesh_dim_names": ticket.mesh_dim_names,
            "mesh_shape": ticket.mesh_shape,
            "master_addr": _MASTER_ADDR,
            "master_port": self._store_port,
            "incarnation": self._incarnation,
            "agent_pid": os.getpid(),
            "log_path": str(ticket.logs / f"rank{rank}.log"),
            "mesh_name": ticket.name,
        }

    def _add_link(self, rank: int, channel: Channel, connection: socket.socket) -> None:
        queued = QueuedChannel(connection)
        self._links[connection.fileno()] = _RankLink(rank, queued)
        self._channels[rank, channel] = queued
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _add_pipe(self, number: int, pipe: _Pipe) -> None:
        os.set_blocking(number, False)
        self._pipes[number] = pipe
        self._epoll.register(number, select.EPOLLIN)

    def _watch_process(self, pid: int, ended: Callable[[], None]) -> None:
        try:
            number = os.pidfd_open(pid)
        except ProcessLookupError:
            ended()
            return

        def on_event() -> None:
            self._forget(number)
            os.close(number)
            ended()

        self._handlers[number] = on_event
        self._epoll.register(number, select.EPOLLIN)

    def _watch_signals(self) -> None:
        number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

        def stop() -> None:
            os.eventfd_read(number)
            self._stop("stopped by a signal")

        self._handlers[number] = stop
        self._epoll.register(number, select.EPOLLIN)
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, lambda *_: os.eventfd_write(number, 1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _forget(self, number: int) -> None:
        if self._handlers.pop(number, None) is not None:
            self._epoll.unregister(number)

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
        self._controllers.setsockopt(zmq.LINGER, 500)
        remove_directory(Path(self._ticket.directory))
        self._controllers.close()
        self._controllers.context.term()


def _reap(pid: int) -> str:
    """Collect an ended child; how it ended, in words."""
    return processes.describe_end(os.waitpid(pid, 0)[1])


def _join(actions: Sequence[Action]) -> list[Action]:
    """Make one message of what goes to the same ranks in a row."""
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


def main(ticket_path: str) -> int:
    """Run an agent.

    Args:
        ticket_path: the mesh's ticket.

    Returns:
        Exit code.
    """
    ticket = read_ticket(Path(ticket_path))
    try:
        agent = Agent(ticket)
    except (HostError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    ticket = msgspec.structs.replace(ticket, agent_pid=os.getpid())
    write_ticket(ticket)
    try:
        agent.serve()
    finally:
        agent.close()
    return 0
