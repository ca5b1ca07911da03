"""Handles of actors on a rank: the object itself where the rank has it, else an object that calls
the actor's ranks over sockets.

A thread, started with the first actor or call, reads all of these sockets. Calls that arrive are
executed on the main thread, between its other work, in the order of arrival; answers complete
futures, for which the main thread waits (or awaits them, in an asyncio task). So the thread answers
even while the main thread waits: it finds cycles of ranks that wait for each other.
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
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import CellmeshError, MeshUsageError, RankDied, RankFailure, RemoteError
from ...stdlib import os
from ...wire import payload
from ...wire.codec import Frame, Parcel, encode
from ...wire.handles import (
    CHALLENGE_BYTES,
    MAX_CALLS,
    PEER_RUNS,
    PROOF_BYTES,
    Address,
    Chase,
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
from ...wire.messages import Done, Failed, Failing
from ...wire.ranks import Results, describe_ranks
from ...wire.stream import Channel, StreamReader
from ...wire.ticket import read_ticket
from ...wire.verbs import Imports, Output, RunCall
from ...wire.waiting import is_own_peer
from .value_transfer import reduce_for_notebook

_CODEC = at_rank_from_rank()
# Numbers of calls are multiples of this, so that no answer waits for others (`Pump.answer`).
_STEP = 16
# A peer answers a challenge, and accepts a connection, at once, unless its interpreter is busy.
_GREET_S = 10.0
# How long a rank waits before it looks for a cycle, and how often it looks.
_CHASE_S = 0.05
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The calls for which the current one is made.
_chain: contextvars.ContextVar[tuple[Link, ...]] = contextvars.ContextVar(
    "cellmesh_chain", default=()
)
Future = concurrent.futures.Future[Parcel[Any]]


class Connection:
    """A socket to another rank.

    Args:
        connection: the socket.
        peer: the rank, in words, for errors.
        rank: its number.

    Attributes:
        pending: calls that the other rank has not answered, with their titles.
        challenge: the challenge that the other rank has not answered yet; b"" for none.
    """

    def __init__(self, connection: socket.socket, peer: str = "", rank: int = -1) -> None:
        self.socket, self.peer, self.rank = connection, peer, rank
        self.reader, self.challenge, self.proof = StreamReader(), b"", b""
        self.pending: dict[int, tuple[Future, str]] = {}
        self.is_open = True
        self._channel, self._lock = Channel(connection), threading.Lock()
        self._outbox = collections.deque[list[Frame]]()

    def send(self, *parcels: Parcel[Any], waits: bool = True) -> None:
        """Send messages, on any thread.

        Args:
            parcels: the messages.
            waits: whether to wait while another thread sends; it sends these as well otherwise.
        """
        self._outbox.append(encode(parcels))
        while self._outbox and self._lock.acquire(blocking=waits):
            try:
                while self._outbox:
                    self._channel.send(self._outbox.popleft())
            except OSError:
                self.close()
            except BaseException:  # an interrupt: a part of the message may have been sent
                self.close()
                raise
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the connection; the thread that reads it gets its end."""
        self.is_open = False
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


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
        self._context, self._actors, self._pid = context, context.actors, os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of what other threads than the reading one change
        self._epoll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._outgoing: dict[tuple[str, int], Connection] = {}  # by mark and rank
        # Calls of other ranks, by the number that their run has here.
        self._incoming: dict[int, tuple[Connection, PeerCall]] = {}
        self._last_run = -1  # the last run of the notebook, whose output that of calls joins
        self._waiting: PeerRun | None = None  # for which the main thread waits

    # ---- handles

    def open(self, address: Address) -> Any:
        """Return what a handle is on this rank; None in a process that the rank has forked."""
        peer = self.peer
        if os.getpid() != self._pid:
            return None
        if address.mark != peer.mark or peer.rank not in address.ranks:
            return RankActor(self, address)
        found = self._actors.get(address.actor)
        gone = "is not on this rank any more: mesh.spawn it again"
        return Stray(address, gone) if found is None else found

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
        self, address: Address, method: str, operation: str, args: Any, kwargs: Any
    ) -> PeerRun:
        """Call a method on the ranks of a handle, without waiting."""
        if os.getpid() != self._pid:
            raise refuse(address)
        title = f"{address.actor}.{method}"
        target = ((address.actor, method, operation), args, kwargs)
        pickled, buffers = payload.dumps(target, title, self.reduce)
        calls = {}
        for rank in address.ranks:
            connection = self._connect(address, rank)
            link = Link(self.peer, next(self._numbers), f"{title} on {address.mesh} {rank}")
            if len(connection.pending) >= MAX_CALLS:
                raise MeshUsageError(
                    f"{MAX_CALLS:,} calls of {connection.peer} are in flight: wait for some of them"
                )
            future: Future = concurrent.futures.Future()
            connection.pending[link.run] = future, link.title
            calls[rank] = connection, link, future
            connection.send(Parcel(PeerCall(link, _chain.get(), pickled), tuple(buffers)))
            if not connection.is_open:
                self._lose(connection)
        return PeerRun(self, title, calls)

    def in_flight(self, address: Address, rank: int) -> int:
        """Return how many calls of this rank another one has not answered."""
        connection = self._outgoing.get((address.mark, rank))
        return 0 if connection is None else len(connection.pending)

    def _connect(self, address: Address, rank: int) -> Connection:
        key = (address.mark, rank)
        with self._lock:
            known = self._outgoing.get(key)
            if known is None or not known.is_open:
                known = self._outgoing[key] = self._dial(address, rank)
            return known

    def _dial(self, address: Address, rank: int) -> Connection:
        """Connect to a rank, and prove that this process may read its mesh's ticket."""
        try:
            ticket = read_ticket(Path(address.directory) / "ticket.json")
            is_there = mark_of(ticket.key) == address.mark and not ticket.spans_hosts
        except CellmeshError:
            is_there = False
        if not is_there:
            raise refuse(
                address,
                "cannot be called from here: its mesh has ended, or is on another host. Between "
                "hosts, let the notebook call it and pass the values on",
            )
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_GREET_S)
            connection.connect(socket_of(address.directory, rank))
            if not is_own_peer(connection):
                raise refuse(address, "is at a socket of another user")
            challenge = connection.recv(CHALLENGE_BYTES)
            if len(challenge) < CHALLENGE_BYTES:
                raise ConnectionError("it has ended")
            connection.sendall(prove(ticket.key, challenge))
        except OSError as error:
            connection.close()
            raise RankDied(
                rank,
                f"of {address.mesh} is dead, or was replaced and has no `{address.actor}` "
                f"({error.strerror or error})",
            ) from None
        except BaseException:
            connection.close()
            raise
        made = Connection(connection, f"{address.mesh} {rank}", rank)
        self._read(made)
        return made

    # ---- waits

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

    def describe_wait(self) -> str:
        """Return the calls for which the main thread waits; "" if it waits for none."""
        run = self._waiting
        return "" if run is None else ", ".join(link.title for _, link in run.open_calls())

    def chase(self, run: PeerRun, links: tuple[Link, ...] = ()) -> None:
        """Look for a cycle: ask the ranks for whose answers a call waits for whom they wait."""
        for connection, link in run.open_calls():
            own = msgspec.structs.replace(link, since_s=run.since_s)
            connection.send(Parcel(Chase((*links, own))), waits=False)

    # ---- calls of other ranks

    def listen(self) -> None:
        """Let other ranks call this one's actors; called on the main thread."""
        if self._listener is not None or self._ticket.host is not None:
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
        self._context.tasks.let_wake()
        self._context.divert(self._divert)
        self._start().register(listener, select.EPOLLIN)

    def serve(self, name: str, method: str, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Execute the call of another rank that has just begun (an operation of `Actors`)."""
        if operation not in ("call", "send"):
            raise MeshUsageError(f"ranks do not {operation} actors of others")
        _, call = self._incoming[self._context.interrupts.running]
        chain = (*call.chain, call.link)
        if (found := self._actors.get(name)) is not None:
            find_method(type(found), name, method)
        token = _chain.set(chain)
        try:
            value = self._actors.find(operation, (name, method))[1](*args, **kwargs)
        finally:
            _chain.reset(token)
        return _await_in(chain, value) if inspect.isawaitable(value) else value

    def _divert(self, parcels: Sequence[Parcel[Any]]) -> list[Parcel[Any]]:
        """Send the answers to calls of other ranks; return the messages for the notebook, with the
        output of these calls as that of the last run.
        """
        kept = []
        for parcel in parcels:
            verb, run = parcel.verb, getattr(parcel.verb, "run", -1)
            if run not in PEER_RUNS:
                self._last_run = run if type(verb) in (Done, Failed, Output) else self._last_run
                kept.append(parcel)
            elif type(verb) in (Done, Failed):
                connection, call = self._incoming.pop(run, (None, None))
                if connection is not None and call is not None:
                    answer = msgspec.structs.replace(verb, run=call.link.run)
                    connection.send(Parcel(answer, parcel.buffers))
            elif type(verb) not in (Failing, Imports):
                kept.append(Parcel(msgspec.structs.replace(verb, run=self._last_run), parcel[1]))
        return kept

    # ---- the thread

    def _start(self) -> select.epoll:
        """Start the thread that reads, unless it runs."""
        if self._epoll is None:
            self._epoll = select.epoll()
            os.register_at_fork(after_in_child=self._close_in_child)
            threading.Thread(target=self._serve, name="cellmesh-handles", daemon=True).start()
        return self._epoll

    def _close_in_child(self) -> None:
        sockets = [each.socket for each in self._connections.values()]
        for each in (*sockets, self._listener):  # else the others would not see this rank's end
            if each is not None:
                with contextlib.suppress(OSError):
                    os.close(each.detach())

    def _read(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        self._connections[descriptor] = connection
        self._start().register(descriptor, select.EPOLLIN)

    def _serve(self) -> None:
        assert self._epoll is not None
        while True:
            try:
                for descriptor, _ in self._epoll.poll():
                    if self._listener is not None and descriptor == self._listener.fileno():
                        self._meet(self._listener.accept()[0])
                    elif (connection := self._connections.get(descriptor)) is not None:
                        self._hear(connection)
            except BaseException:  # as user code can raise in any thread, or use up descriptors
                time.sleep(0.01)

    def _meet(self, accepted: socket.socket) -> None:
        """Send a challenge to a process that has connected."""
        connection = Connection(accepted)
        if is_own_peer(accepted):
            connection.challenge = os.urandom(CHALLENGE_BYTES)
            accepted.send(connection.challenge)
            self._read(connection)
        else:
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
                    self._take(connection, parcel)
        except BlockingIOError:
            return
        except (OSError, CellmeshError):
            messages = None
        if messages is None:
            self._lose(connection)

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

    def _lose(self, connection: Connection) -> None:
        """Drop a connection, and fail the calls that wait for its answers."""
        with self._lock:
            connection.close()
            if self._connections.pop(connection.socket.fileno(), None) is not None:
                connection.socket.close()
            lost, connection.pending = connection.pending, {}
        for future, title in lost.values():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(
                    RankDied(connection.rank, f"has ended, or was replaced, before {title} had")
                )

    def _take(self, connection: Connection, parcel: Parcel[Any]) -> None:
        verb = parcel.verb
        match verb:
            case Done() | Failed():
                future, _ = connection.pending.pop(verb.run, (None, ""))
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(parcel)
            case PeerCall():
                waiting = self._waiting
                runs = set() if waiting is None else {link.run for _, link in waiting.open_calls()}
                for at, link in enumerate(verb.chain):
                    if link.caller == self.peer and link.run in runs:
                        text = describe_cycle((*verb.chain[at:], verb.link))
                        self._refuse(connection, verb.link.run, text)
                        return
                run = PEER_RUNS.start + _STEP * next(self._numbers)
                self._incoming[run] = connection, verb
                work = RunCall(run, verb.payload, interleaves=True, of_actor="serve")
                self._context.tasks.add(Parcel(work, parcel.buffers))
            case PeerCancel():
                for run, (of, call) in [*self._incoming.items()]:
                    if of is connection and call.link.run == verb.run:
                        self._context.interrupts.request(run)
            case Chase():
                self._follow(verb.links)

    def _refuse(self, connection: Connection, run: int, text: str) -> None:
        failed = Failed(run, "MeshUsageError", text, text, 0)
        pickled, _ = payload.dumps(MeshUsageError(text), "the error")
        answer = msgspec.structs.replace(failed, payload=pickled, traceback="")
        connection.send(Parcel(answer), waits=False)

    def _follow(self, links: tuple[Link, ...]) -> None:
        """Follow a chain of ranks that wait to those for which this rank waits."""
        run = self._waiting
        if run is None:
            return
        for connection, link in run.open_calls():
            if links[0].caller == self.peer and links[0].run == link.run:
                if closes_last(links[0], links):
                    future, _ = connection.pending.pop(link.run, (None, ""))
                    if future is not None:
                        future.set_exception(MeshUsageError(describe_cycle(links)))
                        connection.send(Parcel(PeerCancel(link.run)), waits=False)
                return
        if all(link.caller != self.peer for link in links):
            self.chase(run, links)


async def _await_in(chain: tuple[Link, ...], value: Awaitable[Any]) -> Any:
    _chain.set(chain)
    return await value


# ---------------------------------------------------------------- for user code


class PeerRun(Awaitable[Any]):
    """A call of other ranks, in flight or ended: await it, or call `result`.

    Args:
        handles: the handles of this rank.
        title: name of the call.
        calls: rank -> its connection, the call and its answer.
    """

    def __init__(
        self, handles: Handles, title: str, calls: dict[int, tuple[Connection, Link, Future]]
    ) -> None:
        self._handles, self._title, self._calls = handles, title, calls
        self.since_s = 0.0

    def open_calls(self) -> list[tuple[Connection, Link]]:
        """Return the calls that have not ended."""
        return [(to, link) for to, link, future in self._calls.values() if not future.done()]

    def done(self) -> bool:
        """Return whether every rank has answered."""
        return not self.open_calls()

    def cancel(self) -> None:
        """Interrupt the call on its ranks; return without waiting."""
        for connection, link in self.open_calls():
            connection.send(Parcel(PeerCancel(link.run)))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answers, and return the value, or `Results` of several ranks. Blocks.

        Args:
            timeout_s: how long to wait, in seconds; None for no limit. The call goes on after a
                time-out.

        Raises:
            RankDied: a rank has ended.
            MeshUsageError: ranks wait for each other in a cycle, which this call has closed.
            TimeoutError: there is no answer in time.
        """
        self.since_s = time.monotonic()
        until = self.since_s + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        step = _CHASE_S
        with self._handles.wait_for(self):
            for _, link, future in self._calls.values():
                while not future.done():
                    left = until - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"{link.title} has not ended after {timeout_s} s")
                    try:
                        concurrent.futures.wait((future,), min(step, left))
                    except BaseException:  # the interrupt of this rank
                        self.cancel()
                        raise
                    if not future.done():
                        self._handles.chase(self)
                        step = 1.0
        return self._values()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Any:
        try:
            for _, _, future in self._calls.values():
                await asyncio.wait((asyncio.wrap_future(future),))
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._values()

    def _values(self) -> Any:
        values: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        for rank, (_, link, future) in self._calls.items():
            try:
                values[rank] = _value_of(future.result(), link.title)
            except Exception as error:
                errors[rank] = error
        first = next(iter(errors.values()), None)
        if first is not None and len(self._calls) == 1:
            raise first
        if first is not None:
            summary = f"{self._title} failed on {describe_ranks(errors)}: {first}"
            raise RankFailure(summary, errors)
        return Results(values) if len(self._calls) > 1 else next(iter(values.values()))

    def __repr__(self) -> str:
        return f"<{self._title} on {describe_ranks(self._calls)}{': done' if self.done() else ''}>"


def _value_of(parcel: Parcel[Any], title: str) -> Any:
    """Return the value of an answer, or raise the exception in it."""
    verb = parcel.verb
    if type(verb) is Done:
        return None if verb.payload is None else payload.loads(verb.payload, parcel.buffers)
    raised: Any = None
    if verb.payload is not None:
        with contextlib.suppress(Exception):
            raised = payload.loads(verb.payload, parcel.buffers)
    if not isinstance(raised, Exception):  # an interrupt there is none here
        raised = RemoteError(verb.type_name, verb.text, verb.why_no_payload)
    if "\n" in verb.traceback:
        raised.add_note(f"raised by {title}:\n{_COLOURS.sub('', verb.traceback)}")
    raise raised


class RankActor:
    """A handle of an actor of other ranks, on a rank: its attributes are the actor's methods."""

    __slots__ = ("_address", "_handles")

    def __init__(self, handles: Handles, address: Address) -> None:
        self._handles, self._address = handles, address

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks for such by itself
            raise AttributeError(f"{name} is private, and a handle calls public methods only")
        return RankMethod(self._handles, self._address, name)

    def __getitem__(self, index: int | slice | Sequence[int]) -> RankActor:
        ranks = self._address.ranks
        if isinstance(index, int):
            chosen: tuple[int, ...] = (ranks[index],)
        else:
            picked = ranks[index] if isinstance(index, slice) else (ranks[each] for each in index)
            chosen = tuple(picked)
        return RankActor(self._handles, msgspec.structs.replace(self._address, ranks=chosen))

    def __len__(self) -> int:
        return len(self._address.ranks)

    def __reduce__(self) -> Any:
        return self._address.reduce()

    def __repr__(self) -> str:
        return f"<actor {self._address}>"


class RankMethod:
    """A method of an actor of other ranks, to be called from a rank."""

    def __init__(self, handles: Handles, address: Address, name: str) -> None:
        self._handles, self._address, self._name = handles, address, name

    def _call(self, operation: str, args: Any, kwargs: Any) -> PeerRun:
        return self._handles.call(self._address, self._name, operation, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its value; in an asyncio task, a `PeerRun` to be awaited."""
        run = self._call("call", args, kwargs)
        return run if asyncio._get_running_loop() is not None else run.result()

    def submit(self, *args: Any, **kwargs: Any) -> PeerRun:
        """Call the method, and return a `PeerRun` without waiting."""
        return self._call("call", args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Call the method without a result; an exception is printed on this rank."""
        run = self._call("send", args, kwargs)
        for _, link, future in run._calls.values():
            future.add_done_callback(lambda future, title=link.title: _report(future, title))  # type: ignore[misc]

    def any(self, *args: Any, **kwargs: Any) -> PeerRun:
        """Call the method on the living rank with the fewest calls of this rank in flight."""
        address = self._address
        dead = RankDied(-1, "")
        for rank in sorted(address.ranks, key=lambda rank: self._handles.in_flight(address, rank)):
            one = msgspec.structs.replace(address, ranks=(rank,))
            try:
                return self._handles.call(one, self._name, "call", args, kwargs)
            except RankDied as error:
                dead = error
        raise dead

    def __getattr__(self, name: str) -> Any:
        if name in ("stream", "sharded"):
            raise MeshUsageError(
                f"{self._address.actor}.{self._name}.{name}: only the notebook's handle has it, as "
                "a rank's calls are single ones"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<method {self._address.actor}.{self._name}>"


def _report(future: Future, title: str) -> None:
    try:
        _value_of(future.result(), title)
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        print(f"{title}: {type(error).__name__}: {error}\n{notes}", file=sys.stderr)
