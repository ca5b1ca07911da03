"""Handles of actors on a rank: the object itself where the rank has it, else an object that calls
the actor's ranks over sockets.

The main thread reads all of these sockets while it waits, for work or for an answer: a call then
wakes one thread on each side. While it computes, another thread reads, started with the first actor
or call. Calls that arrive are executed on the main thread, between its other work, in the order of
arrival; answers complete futures. So a rank reads even while user code waits: it finds cycles of
ranks that wait for each other.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import hmac
import inspect
import itertools
import pickle
import select
import socket
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import CellmeshError, MeshUsageError, RankDied
from ...stdlib import os
from ...wire import payload
from ...wire.codec import Frame, Parcel
from ...wire.handles import (
    CHALLENGE_BYTES,
    MAX_CALLS,
    PROOF_BYTES,
    Address,
    Chase,
    FindActor,
    Link,
    Peer,
    PeerCall,
    PeerCancel,
    Stray,
    at_rank_from_rank,
    closes_last,
    describe_cycle,
    find_method,
    mark_of,
    prove,
    refuse,
    socket_of,
)
from ...wire.messages import Done, Failed, Failing, Pickled
from ...wire.peer_calls import PEER_RUNS, PeerWork
from ...wire.ticket import read_ticket
from ...wire.verbs import Imports, Output, RunCall
from ...wire.waiting import is_own_peer
from .peer_calls import PeerCalls
from .peer_connections import GREET_S, Connection, Future, dial, refuse_silent
from .relayed import Relays
from .remote_actors import PeerRun, RankActor
from .value_transfer import reduce_for_notebook

_CODEC = at_rank_from_rank()
_OPERATIONS = "call", "send", "begin_stream", "advance", "end_stream"  # of `Actors`, for ranks
# How long the other thread leaves the sockets to the main thread after this has waited.
_LEAVE_S = 0.002
# How long a thread that has just heard of another rank looks out for more without sleeping: to wake
# a thread takes longer than a short call.
_SPIN_S = 4e-4
# The calls for which the current one is made.
_chain: contextvars.ContextVar[tuple[Link, ...]] = contextvars.ContextVar(
    "cellmesh_chain", default=()
)

# The task that executes the current call of another rank, if it is asynchronous.
_own_task: contextvars.ContextVar[Any] = contextvars.ContextVar("cellmesh_own_task", default=None)


class Handles:
    """The handles that have arrived on a rank, those of its own objects that leave it, and the
    calls from and to other ranks.

    Args:
        context: the objects of the rank (`RankContext`).
    """

    def __init__(self, context: Any) -> None:
        directory = str(Path(context.code).parents[1])
        self._ticket = read_ticket(Path(directory) / "ticket.json")
        rank = context.groups.rank
        self.peer = Peer(mark_of(self._ticket.key), self._ticket.name, directory, rank)
        self._context, self._actors, self._pid = context, context.actors, context.pid
        # As numbers of runs on other ranks are made of them, those of each rank begin elsewhere.
        self._numbers = itertools.count(int.from_bytes(os.urandom(4)))
        self._lock = threading.Lock()  # of what other threads than the reading one change
        self._epoll: select.epoll | None = None  # of all sockets
        self._gate: select.epoll | None = None  # of `_epoll` while the other thread is to read it
        self._reading, self._polled_at = threading.RLock(), 0.0
        self._readable, self._heard_at = select.poll(), 0.0
        self._listener: socket.socket | None = None
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._outgoing: dict[tuple[str, int], Connection] = {}  # by mark and rank
        self._ending = collections.deque[tuple[Address, str, int]]()  # streams
        self.relays, self.is_listening = Relays(context), False
        self.served = PeerCalls(context)
        self._last_run = -1  # the last run of the notebook, whose output that of calls joins
        self._waiting: PeerRun | None = None  # for which the main thread waits
        # Calls that tasks await, each with the call of another rank for which its task executes.
        self._awaited: dict[PeerRun, Link] = {}

    # ---- handles

    def open(self, address: Address) -> Any:
        """Return what a handle or a mesh is on this rank; None in a process that it has forked."""
        peer = self.peer
        if os.getpid() != self._pid:
            return None
        if not address.actor:
            return self._mesh(address)
        if address.mark != peer.mark or peer.rank not in address.ranks:
            return RankActor(self, address)
        found = self._actors.get(address.actor)
        gone = "is not on this rank any more: mesh.spawn it again"
        return Stray(address, gone) if found is None else found

    def _mesh(self, address: Address) -> Any:
        """Return the DeviceMesh that cells find as ``mesh``, for the mesh of the notebook; an
        object that refuses its use, if that is another mesh or has no process group.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if address.mark != self.peer.mark:
            own = f"{self.peer.mesh}, that of this rank, whose DeviceMesh is `mesh` here"
            return Stray(address, f"is another mesh than {own}")
        variable = self._context.shell.user_ns.get("mesh")
        found = variable if isinstance(variable, DeviceMesh) else self._context.groups.mesh
        return found or Stray(address, "has no process group, and its rank no DeviceMesh")

    def reduce(self, value: Any) -> Any:
        """Return a pickle reduction of a value that leaves this rank, as `reduce_for_notebook`; the
        object of an actor leaves it as its handle.
        """
        if name := self._actors.name_of(value):
            peer, kind = self.peer, type(value).__name__
            place = (peer.mark, peer.mesh, peer.directory)
            return Address(*place, name, kind, (peer.rank,)).reduce()
        return reduce_for_notebook(value)

    # ---- calls of this rank

    def call(
        self, address: Address, method: str, operation: str, *shares: tuple[Any, Any],
        index_of: Mapping[int, int] | None = None,
    ) -> PeerRun:  # fmt: skip
        """Call a method on the ranks of a handle, without waiting.

        Args:
            address: the handle.
            method: name of the method.
            operation: name of the operation of `Actors`.
            shares: positional and keyword arguments, once or for each index.
            index_of: rank -> index of its arguments.
        """
        if os.getpid() != self._pid:
            raise refuse(address)
        # Not after the sending: the called rank may be faster, and wait for this one since then.
        title, since_s = f"{address.actor}.{method}", time.monotonic()
        target = address.actor, method, operation
        packed = [self._pack(title, (target, *each)) for each in shares]
        connections = {rank: self._connect(address, rank) for rank in address.ranks}
        for rank, connection in connections.items():
            if len(connection.pending) >= MAX_CALLS:
                raise MeshUsageError(
                    f"{MAX_CALLS:,} calls of {connection.peer} are in flight: wait for some of them"
                )
            index = index_of[rank] if index_of else 0
            packed[index] = connection.lend(*packed[index])  # once for all ranks that get it
        calls, number = {}, next(self._numbers)
        for rank, connection in connections.items():  # only now, so that all or none are called
            link = Link(self.peer, next(self._numbers), f"{title} on {address.mesh} {rank}")
            pickled, buffers = packed[index_of[rank] if index_of else 0]
            call = PeerCall(link, _chain.get(), pickled, number, address.ranks)
            sent = self._send(connection, link.run, link.title, Parcel(call, tuple(buffers)))
            calls[rank] = connection, link, sent
        return PeerRun(self, title, calls, since_s)

    def _pack(self, title: str, call: tuple[Any, Any, Any]) -> tuple[Pickled, list[Frame]]:
        _, args, kwargs = call
        if all(map(payload.is_short, (*args, *kwargs.values()))):
            return Pickled(pickle.dumps(call, 5)), []
        return payload.dumps(call, title, self.reduce)

    def end_stream(self, address: Address, method: str, number: int) -> None:
        """Close the generators of a stream on its ranks, without waiting; the thread that reads
        does so, as this one may be anywhere if it collects garbage.
        """
        self._ending.append((address, method, number))
        os.eventfd_write(self.relays.wake, 1)

    def _end_stream(self, address: Address, method: str, number: int) -> None:
        known = {rank: self._outgoing.get((address.mark, rank)) for rank in address.ranks}
        ranks = tuple(rank for rank, to in known.items() if to is not None and to.is_open)
        there = msgspec.structs.replace(address, ranks=ranks)
        with contextlib.suppress(CellmeshError):
            self.call(there, method, "end_stream", ((number,), {}))

    def check(self, address: Address, rank: int) -> None:
        """Check that a rank has an actor, unless it is known, as `dims_of`."""
        if address.actor not in self._connect(address, rank).known:
            self.dims_of(address, rank)

    def dims_of(self, address: Address, rank: int) -> dict[str, int]:
        """Return the dims of the mesh of a rank that has an actor. Blocks.

        Raises:
            RankDied: the rank is dead, or was replaced and has no such actor.
            HostError: the rank does not answer.
        """
        connection = self._connect(address, rank)
        run, title = next(self._numbers), f"it was called as `{address.actor}`"
        question = Parcel(FindActor(run, address.actor))
        try:
            answer = self._send(connection, run, title, question).result(GREET_S)
        except TimeoutError:
            raise refuse_silent(address, rank) from None
        if type(answer.verb) is Failed:
            raise RankDied(rank, f"of {address.mesh} {answer.verb.text}")
        connection.known.add(address.actor)
        return dict(pickle.loads(answer.verb.payload.stream))

    def _send(self, connection: Connection, run: int, title: str, parcel: Parcel[Any]) -> Future:
        """Send a call, and return its answer to come."""
        future = Future()
        connection.pending[run] = future, title
        try:
            connection.send(parcel)
        except BaseException:  # an interrupt, or it is too large
            connection.pending.pop(run, None)
            raise
        if not connection.is_open:
            self.lose(connection)
        return future

    def in_flight(self, address: Address, rank: int) -> int:
        """Return how many calls of this rank another one has not answered."""
        connection = self._outgoing.get((address.mark, rank))
        return 0 if connection is None else len(connection.pending)

    def _connect(self, address: Address, rank: int) -> Connection:
        key = (address.mark, rank)
        if (known := self._outgoing.get(key)) is not None and known.is_open:
            return known
        dialled = dial(address, rank)  # without the lock, as that may take seconds
        with self._context.interrupts, self._lock:
            known = self._outgoing.get(key)
            if known is None or not known.is_open:
                known = self._outgoing[key] = dialled or self.relays.to(*key)
                self._start()  # also for answers of other hosts, for which there is no socket
                if known is dialled:
                    self._read(known)
        if dialled is not None and known is not dialled:  # another thread has been faster
            dialled.socket.close()
        return known

    # ---- waits

    @contextlib.contextmanager
    def await_in_call(self, run: PeerRun) -> Iterator[bool]:
        """Let the current task await a call; give whether the task executes another rank's call,
        so that it may close a cycle (`chase_awaited`).
        """
        try:
            yield bool(_chain.get())
        finally:
            self._awaited.pop(run, None)

    @contextlib.contextmanager
    def wait_for(self, run: PeerRun) -> Iterator[None]:
        """Record that the calling thread waits for a call; other threads' waits block no calls."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._waiting = self._waiting, run
        try:
            yield
        finally:
            self._waiting = before

    def await_answer(self, future: Future, limit_s: float) -> None:
        """Wait for an answer, at most for so many seconds."""
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                future.exception(limit_s)
            return
        until = time.monotonic() + limit_s
        while not future.done() and (left_s := until - time.monotonic()) > 0:
            if self.poll(self._readable, 1e3 * left_s):
                with self._context.interrupts:
                    self.hear()

    def describe_wait(self) -> str:
        """Return the calls for which the main thread waits; "" if it waits for none."""
        run = self._waiting
        return "" if run is None else ", ".join(link.title for _, link in run.open_calls())

    def chase_awaited(self, run: PeerRun) -> None:
        """Look for a cycle with a call that the current task has awaited for some time."""
        if _is_endless():
            self._awaited[run] = _chain.get()[-1]
            self.chase(run)

    def chase(self, run: PeerRun, links: tuple[Link, ...] = ()) -> None:
        """Look for a cycle: ask the ranks for whose answers a call waits for whom they wait."""
        for connection, link in run.open_calls():
            own = msgspec.structs.replace(link, since_s=run.since_s)
            connection.send(Parcel(Chase((*links, own))))

    # ---- calls of other ranks

    def listen(self) -> None:
        """Let other ranks call this one's actors; called on the main thread."""
        with self._context.interrupts:
            if not self.is_listening:
                self._listen()

    def _listen(self) -> None:
        self._context.divert(self._divert)
        self._context.tasks.let_wake(self)
        with self._lock:
            epoll = self._start()
        self.is_listening = True
        if self._ticket.host is not None:  # ranks of other hosts call by way of the notebook
            return
        path = socket_of(self.peer.directory, self.peer.rank)
        listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of the process that this one has replaced
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(256)
        listener.setblocking(False)
        self._listener = listener
        epoll.register(listener, select.EPOLLIN)

    def serve(self, name: str, method: str, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Execute the call of another rank that has just begun (an operation of `Actors`)."""
        if operation not in _OPERATIONS:
            raise MeshUsageError(f"ranks do not {operation} actors of others")
        caller, call = self.served.find(self._context.interrupts.running)
        chain = (*call.chain, call.link)
        found = self._actors.get(name)
        is_plain = not method.startswith("_") and callable(getattr(type(found), method, None))
        if found is not None and not is_plain:
            find_method(type(found), name, method)  # raises
        token = _chain.set(chain)
        try:
            value = self._actors.find(operation, (name, method))[1](*args, **kwargs)
        finally:
            _chain.reset(token)
        if operation == "begin_stream":
            end = Pickled(pickle.dumps(((name, method, "end_stream"), args[:1], {}), 5))
            stream = self._actors.streams[args[0]]
            stream.reader, stream.end = caller, msgspec.structs.replace(call, payload=end)
            if not caller.is_open:  # it was lost before this was known
                self._end_streams(caller)
        is_awaited = value is not None and inspect.isawaitable(value)
        return _await_in(chain, value) if is_awaited else value

    def _end_streams(self, reader: Connection) -> None:
        """Close the generators of a reader that is lost, as if it had left its loops."""
        for stream in [*self._actors.streams.values()]:
            if stream.reader is reader:
                self.take(reader, Parcel(stream.end))

    def _divert(self, parcels: Sequence[Parcel[Any]]) -> list[Parcel[Any]]:
        """Send the answers to calls of other ranks; return the messages for the notebook, with the
        output of these calls as that of the last run, and the ends of those that concern it.
        """
        kept = []
        for parcel in parcels:
            verb, run = parcel.verb, getattr(parcel.verb, "run", -1)
            if run not in PEER_RUNS or type(verb) is Imports:
                if run >= 0 and type(verb) in (Done, Failed, Output):
                    self._last_run = run
                kept.append(parcel)
            elif type(verb) in (Done, Failed, PeerWork):
                kept += self.served.divert(parcel)
            elif type(verb) is not Failing:
                kept.append(Parcel(msgspec.structs.replace(verb, run=self._last_run), parcel[1]))
        return kept

    # ---- the thread

    def _start(self) -> select.epoll:
        """Start the thread that reads, unless it runs."""
        if self._epoll is None:
            self._epoll = select.epoll()
            self._epoll.register(self.relays.wake, select.EPOLLIN)
            self._readable.register(self, select.POLLIN)
            self._gate = select.epoll()
            for descriptor in (self._epoll.fileno(), self.served.wake):
                self._gate.register(descriptor, select.EPOLLIN)
            os.register_at_fork(after_in_child=self._close_in_child)
            threading.Thread(target=self._serve, name="cellmesh-handles", daemon=True).start()
        return self._epoll

    def wake(self) -> None:
        """Have the thread handle what has come by way of the notebook; usable on any thread."""
        with self._lock:
            self._start()
        os.eventfd_write(self.relays.wake, 1)

    def _close_in_child(self) -> None:
        sockets = [each.socket for each in self._connections.values()]
        for each in (*sockets, self._listener):  # else the others would not see this rank's end
            if each is not None:
                with contextlib.suppress(OSError):
                    os.close(each.detach())

    def _read(self, connection: Connection) -> None:
        descriptor, epoll = connection.socket.fileno(), self._start()
        self._connections[descriptor] = connection

        def want(is_full: bool) -> None:
            with contextlib.suppress(OSError):  # it has been closed
                epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if is_full else 0))

        connection.on_full = want
        epoll.register(descriptor, select.EPOLLIN)

    def _serve(self) -> None:
        assert self._gate is not None
        while True:
            try:
                for descriptor, _ in self._gate.poll(self.served.look()):
                    if descriptor == self.served.wake:
                        os.eventfd_read(descriptor)
                    elif (left_s := self._polled_at + _LEAVE_S - time.monotonic()) > 0:
                        time.sleep(left_s)  # the main thread is about to wait again, and to read
                    else:
                        self.hear()
                        if self._waiting is not None:  # it may have missed its answer
                            os.eventfd_write(self.relays.wake, 1)
            except BaseException:  # as user code can raise in any thread, or use up descriptors
                time.sleep(0.01)

    def fileno(self) -> int:
        """Return the descriptor that is readable once there is something to `hear`."""
        assert self._epoll is not None
        return self._epoll.fileno()

    def poll(self, poll: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]:
        """Wait on the main thread for descriptors, of which this one may be one, while the other
        thread does not read.
        """
        assert self._gate is not None
        modify, descriptor, readable = self._gate.modify, self.fileno(), select.EPOLLIN
        try:
            modify(descriptor, 0)
            until = self._heard_at + _SPIN_S
            while not (ready := poll.poll(0)) and time.monotonic() < until:
                os.sched_yield()
            return ready or poll.poll(timeout_ms)
        finally:  # without a call of Python's, at which an interrupt could strike
            modify(descriptor, readable)
            self._polled_at = time.monotonic()

    def hear(self) -> None:
        """Handle everything that has arrived."""
        assert self._epoll is not None
        with self._reading:
            self._heard_at = time.monotonic()
            for descriptor, event in self._epoll.poll(0):
                if (connection := self._connections.get(descriptor)) is not None:
                    if event & select.EPOLLOUT:
                        connection.send()
                    if event != select.EPOLLOUT:
                        self._hear(connection)
                elif descriptor == self.relays.wake:
                    self.relays.hear(self)
                    while self._ending:
                        self._end_stream(*self._ending.popleft())
                elif self._listener is not None and descriptor == self._listener.fileno():
                    try:
                        accepted, _ = self._listener.accept()
                    except OSError:  # no descriptor is free
                        time.sleep(0.01)
                    else:
                        self._meet(accepted)

    def _meet(self, accepted: socket.socket) -> None:
        """Send a challenge to a process that has connected."""
        connection = Connection(accepted)
        connection.challenge = os.urandom(CHALLENGE_BYTES)
        try:
            if is_own_peer(accepted):
                accepted.send(connection.challenge)
                self._read(connection)
                return
        except OSError:  # it has gone
            pass
        accepted.close()

    def _hear(self, connection: Connection) -> None:
        """Read from a connection once."""
        messages: list[list[Frame]] | None
        try:
            if connection.challenge:
                messages = self._admit(connection)
            else:
                messages = connection.reader.read_from(connection.socket)
            for frames in messages or ():
                for parcel in _CODEC.decode(frames):
                    self.take(connection, parcel)
        except BlockingIOError:
            return
        except (OSError, CellmeshError):
            messages = None
        if messages is None:
            self.lose(connection)

    def _admit(self, connection: Connection) -> list[list[Frame]] | None:
        """Read the answer to the challenge; return None if it is wrong."""
        data = connection.socket.recv(PROOF_BYTES - len(connection.proof))
        connection.proof += data
        if data and len(connection.proof) < PROOF_BYTES:
            return []
        if hmac.compare_digest(connection.proof, prove(self._ticket.key, connection.challenge)):
            connection.challenge = b""
            return []
        return None

    def lose(self, connection: Connection, why: str = "") -> None:
        """Drop a connection, and fail the calls that wait for its answers."""
        with self._lock:
            connection.close()
            if self._connections.pop(connection.number, None) is not None:
                connection.socket.close()
            lost, connection.pending = connection.pending, {}
        for future, title in lost.values():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                reason = why or f"has ended, or was replaced, before {title} had"
                future.set_exception(RankDied(connection.rank, reason))
        self.served.cancel(connection)  # nobody would receive the answers
        self._end_streams(connection)

    def take(self, connection: Connection, parcel: Parcel[Any]) -> None:
        """Handle a message of another rank."""
        verb = parcel.verb
        match verb:
            case Done() | Failed():
                future, _ = connection.pending.pop(verb.run, (None, ""))
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(parcel)
            case PeerCall():
                run = self.served.add(connection, verb)
                work = RunCall(run, verb.payload, interleaves=True, of_actor="serve")
                self._context.tasks.add(Parcel(work, parcel.buffers))
            case PeerCancel():
                self.served.cancel(connection, verb.run)
            case FindActor():
                is_here, mesh = self._actors.get(verb.actor) is not None, self._context.groups.mesh
                dims = () if mesh is None else (*zip(mesh.mesh_dim_names, mesh.shape, strict=True),)
                text = f"has no `{verb.actor}` any more: mesh.spawn makes it again"
                failed = Failed(verb.run, "RankDied", text, "", 0)
                done = Done(verb.run, Pickled(pickle.dumps(dims, 5)))
                connection.send(Parcel(done if is_here else failed))
            case Chase():
                self._follow(verb.links)

    def _follow(self, links: tuple[Link, ...]) -> None:
        """Follow a chain of calls that wait to those for which the last one waits on this rank."""
        numbers, last = {(link.caller, link.run) for link in links}, links[-1]
        for run, of in [*self._awaited.items()]:
            if (of.caller, of.run) == (last.caller, last.run):
                own = {(link.caller, link.run) for _, link in run.open_calls()}
                if not self._close(run, links) and numbers.isdisjoint(own):
                    self.chase(run, links)
        waiting = self._waiting  # for which all other calls on this rank wait
        if waiting is None or not waiting.is_endless or self._close(waiting, links):
            return
        if self.peer not in {link.caller for link in links}:
            self.chase(waiting, links)

    def _close(self, run: PeerRun, links: tuple[Link, ...]) -> bool:
        """Return whether a chain of calls begins with one of a run, which then fails if it is the
        last one.
        """
        for connection, link in run.open_calls():
            if (links[0].caller, links[0].run) == (link.caller, link.run):
                if closes_last(links[0], links):
                    future, _ = connection.pending.pop(link.run, (None, ""))
                    if future is not None:
                        error = MeshUsageError(describe_cycle((*links[1:], links[0])))
                        future.set_exception(error)
                        connection.send(Parcel(PeerCancel(link.run)))
                return True
        return False


async def _await_in(chain: tuple[Link, ...], value: Awaitable[Any]) -> Any:
    _chain.set(chain)
    _own_task.set(asyncio.current_task())
    return await value


def _is_endless() -> bool:
    """Return whether the call that executes waits as long as the current task: this is its own
    task, or one that it gathers, and it has no time-out. Other tasks of user code may be waited for
    with one, or by nobody.
    """
    if (own := _own_task.get()) is None:
        return False
    timers = (getattr(each._callback, "__self__", None) for each in own.get_loop()._scheduled)
    if any(of is own or getattr(of, "_task", None) is own for of in timers):  # `asyncio.timeout`
        return False
    return asyncio.current_task() in (own, *getattr(own._fut_waiter, "_children", ()))
