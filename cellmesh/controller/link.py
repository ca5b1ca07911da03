"""The link to an agent: one thread that owns the socket and carries out what `Core` decides."""

from __future__ import annotations

import collections
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from ..errors import MeshUsageError, NoMeshError, ProtocolError
from ..stdlib import time
from ..wire.faults import Faults
from ..wire.framing import Parcel
from ..wire.messages import AgentFault, Ask, AskEnded, Died, Done, Failed, Welcome
from . import beside
from .adopting import Adopted
from .connection import Connection
from .core import Answer, Change, Core, Deliver, Effect, Finish, Note, Send, Waits, Watch
from .output.printer import Printer
from .run import Run

# Output may come long after its run (threads): the printers of so many ended runs are kept, the newest cells'
# and the newest calls'.
_MAX_ENDED = 256

# Before what has just failed is tried again because it is still due.
_PAUSE_MS = 100

Command = Callable[[Core, float], Sequence[Effect]]


class Link:
    """Connects to an agent and serves runs.

    Args:
        endpoint: the agent's.
        key: the mesh's secret, hex.
        core: decides; used on the link's thread only.
        agent_pid: the agent's process; its end ends the mesh.
        on_change: told of every change of the mesh's state, on the link's thread.
        adopt: makes the runs that are in flight when the agent accepts us, on the link's thread; they are
            not in flight any more once they are done.
        on_aside: told of what ranks say beside their output, on the link's thread.
        on_close: told when the link's sockets are closed, on its thread, which ends then.
        steal: whether to take the mesh from a controller that holds it.
    """

    def __init__(
        self,
        endpoint: str,
        key: str,
        core: Core,
        agent_pid: int,
        on_change: Callable[[Change], None],
        adopt: Callable[[Welcome], Adopted],
        on_aside: Callable[[int, tuple[int, ...], Parcel[Any]], None],
        on_close: Callable[[], None],
        steal: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._key = bytes.fromhex(key)
        self._adopt = adopt
        self._on_aside = on_aside
        self._on_close = on_close
        self._steal = steal
        self._others: Printer | None = None
        self._core = core
        self._on_change = on_change
        self._runs: dict[int, Run[Any]] = {}
        self._printers: dict[int, Printer] = {}
        self._ended: dict[bool, collections.deque[int]] = {
            is_cell: collections.deque() for is_cell in (False, True)
        }
        self._timed: dict[int, Printer] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._commands: list[Command] = []
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._agent = os.pidfd_open(agent_pid)
        self._closing = False
        self._pid = os.getpid()
        self._faults, self._num_faults = Faults("the notebook's link to the mesh", _warn), 0
        self._thread = threading.Thread(target=self._serve, name="cellmesh-link", daemon=True)
        self._thread.start()

    # ---- from any thread

    def post(self, command: Command) -> None:
        """Have the core do something; returns at once.

        Raises:
            NoMeshError: the link has been closed.
            MeshUsageError: this is a process forked from the one that has the link.
        """
        if os.getpid() != self._pid:
            raise MeshUsageError(
                f"this process ({os.getpid()}) was forked from the one that holds the mesh ({self._pid}), "
                "and cannot use it: call the mesh there, or in another process that has left it to itself "
                "(`mesh.detach()`), with cellmesh.attach()"
            )
        with self._lock:
            if self._closing:
                raise NoMeshError("the mesh has ended: start another with `%dist_start` or cellmesh.start()")
            self._commands.append(command)
            if len(self._commands) == 1:
                os.eventfd_write(self._wake, 1)

    def start_run(self, run: Run[Any], command: Command) -> None:
        """Register a run, then post the command that sends it."""

        def start(core: Core, now: float) -> Sequence[Effect]:
            self._runs[run.number] = run
            self._printers[run.number] = run.printer
            return command(core, now)

        self.post(start)

    def ask(self, question: Callable[[Core, float], tuple[int, Sequence[Effect]]]) -> Future[Any]:
        """Post a question; the future has its answer, or None if the mesh ended."""
        future: Future[Any] = Future()

        def put(core: Core, now: float) -> Sequence[Effect]:
            try:
                request, effects = question(core, now)
            except Exception as error:
                future.set_exception(error)  # else it would be waited for without end
                return []
            self._answers[request] = future
            return effects

        try:
            self.post(put)
        except NoMeshError:
            future.set_result(None)
        return future

    def close(self) -> None:
        """End the thread and close the socket, as the mesh's end does; waits for both.

        Not from the link's own thread.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    # ---- the link's thread

    def _serve(self) -> None:
        connection = Connection(self._endpoint, self._key, self._steal)
        poller = zmq.Poller()
        for what in (*connection.sockets(), self._wake, self._agent):
            poller.register(what, zmq.POLLIN)
        while not self._closing and self._core.state != "ended":
            self._faults.guard(self._serve_once, connection, poller)
        with self._lock:
            self._closing = True
        self._faults.guard(self._serve_rest, connection)
        connection.close()
        os.close(self._wake)
        os.close(self._agent)
        self._faults.guard(self._on_close)

    def _serve_once(self, connection: Connection, poller: zmq.Poller) -> None:
        ready = dict(poller.poll(self._timeout_ms(connection)))
        now = time.monotonic()
        effects: list[Effect] = []
        if self._wake in ready:
            os.eventfd_read(self._wake)
            effects += self._obey(now)
        if any(socket in ready for socket in connection.sockets()):
            self._faults.guard(self._hear, connection, effects, now)
        elif self._agent in ready:  # only once nothing is left to read
            poller.unregister(self._agent)
            effects += self._core.agent_ended("its agent's process ended")
        self._faults.guard(lambda: effects.extend(self._core.tick(now)))
        self._faults.guard(self._carry_out, effects, connection, now)
        self._faults.guard(connection.tick, now)

    def _hear(self, connection: Connection, effects: list[Effect], now: float) -> None:
        """Add what follows from what the agent says; what one message cannot do leaves the others alone."""
        try:
            for parcel in connection.hear(now):
                try:
                    if type(parcel.verb) is Welcome:
                        self._take_over(parcel.verb)
                    if type(parcel.verb) is AgentFault:
                        _warn(parcel.verb.text)
                    else:
                        effects += self._core.receive(parcel, now)
                except Exception as error:
                    self._faults.take(error)
        except ProtocolError as error:
            effects += self._core.agent_ended(str(error))

    def _serve_rest(self, connection: Connection) -> None:
        """What was asked for before the end is answered, and what was printed is shown."""
        now = time.monotonic()
        self._carry_out(self._obey(now), connection, now)
        for printer in self._timed.values():
            self._faults.guard(printer.show, now, True)

    def _obey(self, now: float) -> list[Effect]:
        with self._lock:
            commands, self._commands = self._commands, []
        effects: list[Effect] = []
        for command in commands:
            self._faults.guard(lambda command: effects.extend(command(self._core, now)), command)
        return effects

    def _take_over(self, welcome: Welcome) -> None:
        adopted = self._adopt(welcome)
        self._others = adopted.others
        for run in adopted.runs:
            self._runs[run.number] = run
            self._printers[run.number] = run.printer

    def _timeout_ms(self, connection: Connection) -> int | None:
        times = [printer.deadline() for printer in self._timed.values()]
        sources = (self._core.deadline(), connection.deadline(), *times)
        deadlines = [at for at in sources if at is not None]
        if not deadlines:
            return None
        num_faults, self._num_faults = self._num_faults, self._faults.num
        least = _PAUSE_MS if num_faults != self._num_faults else 0
        return max(least, int((min(deadlines) - time.monotonic()) * 1000 + 1))

    def _carry_out(self, effects: Sequence[Effect], connection: Connection, now: float) -> None:
        outgoing = [effect.parcel for effect in effects if type(effect) is Send]
        if outgoing:
            self._faults.guard(connection.send, outgoing)
        for effect in effects:
            self._faults.guard(self._apply, effect, now)
        for number, printer in list(self._timed.items()):
            due = printer.deadline()
            if due is not None and due <= now:
                self._faults.guard(printer.show, now)
                due = printer.deadline()
            if due is None:
                del self._timed[number]

    def _apply(self, effect: Effect, now: float) -> None:
        match effect:
            case Deliver(number, ranks, parcel):
                self._deliver(number, ranks, parcel, now)
            case Finish(number):
                self._finish(number, now)
            case Waits(number, states):
                run = self._runs[number]
                run.printer.show(now)
                run.report_waiting(states)
            case Watch(number, states):
                if number in self._runs:
                    self._runs[number].show_live(states, now)
            case Note(number, text):
                if number in self._printers:
                    self._printers[number].note(text, now)
            case Answer(request, value):
                future = self._answers.pop(request, None)
                if future is not None:
                    future.set_result(value)
            case Change():
                if effect.state == "ended":
                    for future in self._answers.values():
                        future.set_result(None)
                    self._answers.clear()
                self._on_change(effect)

    def _finish(self, number: int, now: float) -> None:
        run = self._runs.pop(number)
        ended = self._ended[run.is_cell]
        ended.append(number)
        if len(ended) > _MAX_ENDED:
            self._printers.pop(ended.popleft(), None)
        run.finish(now)

    def _deliver(self, number: int, ranks: tuple[int, ...], parcel: Parcel[Any], now: float) -> None:
        if type(parcel.verb) in (Done, Failed, Died):
            self._runs[number].settle(ranks, parcel, now)
            if type(parcel.verb) is Done:
                return
        elif type(parcel.verb) in beside.KINDS:
            self._on_aside(number, ranks, parcel)
            return
        elif type(parcel.verb) in (Ask, AskEnded):
            if number in self._runs:
                self._runs[number].ask(ranks, parcel.verb, now)
        else:
            printer = self._printers.get(number, self._others)
            if printer is not None:
                printer.feed(ranks, parcel.verb, now)
                self._timed[number] = printer
        if number in self._printers:
            self._timed[number] = self._printers[number]


def _warn(text: str) -> None:
    """Show a text in the notebook; where it cannot take it, in the terminal that it was started from."""
    try:
        print(text, file=sys.stderr, flush=True)
    except Exception:
        print(text, file=sys.__stderr__, flush=True)
