"""The link to a mesh's agents: carries out what `Core` decides, on a thread of its own."""

from __future__ import annotations

import collections
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import NoMeshError, ProtocolError
from ...stdlib import threading, time
from ...wire.attach import Welcome
from ...wire.codec import Parcel
from ...wire.faults import Faults
from ...wire.messages import AgentFault, Died, Done, Failed, Relay
from ...wire.user_code import InputCancelled, InputRequest, Logged
from ...wire.values import Freed
from ..core.core import (
    Answer,
    Change,
    Core,
    Deliver,
    Effect,
    Finish,
    Judge,
    Note,
    Send,
    Waiting,
    Watch,
)
from ..core.mesh_state import HostLost
from ..news import Reply
from ..output.printer import Printer
from ..run import Run
from .hosts.connections import Connections
from .loop import Loop

# Output may come long after its run (threads): the printers of so many ended runs are kept, the
# newest cells' and the newest calls'.
_MAX_ENDED = 256

# Before what has just failed is tried again because it is still due.
_PAUSE_S = 0.1

Command = Callable[[Core, float], Sequence[Effect]]


@dataclass(frozen=True)
class Adopted:
    """The runs of an earlier controller that a session takes over when it attaches.

    Attributes:
        runs: those that nobody has taken in whole.
        others: shows what came of runs that had ended; None if there are none of earlier
            controllers.
    """

    runs: Sequence[Run[Any]]
    others: Printer | None


class Owner(Protocol):
    """Protocol of the session that has the link; all is called on the link's thread."""

    def connect(self) -> Connections:
        """Connect to the agent."""

    def adopt(self, welcome: Welcome) -> Adopted:
        """Make the runs that are in flight when the agent accepts this controller."""

    def note(self, change: Change) -> None:
        """Note a change of the mesh's state."""

    def take(self, run: int, ranks: tuple[int, ...], parcel: Parcel[Any]) -> None:
        """Handle a message of ranks that is no output or answer."""

    def forget(self, run: int) -> None:
        """Note that a run is not in flight any more."""

    def note_closed(self) -> None:
        """Note that the link's sockets are closed, and that its thread ends."""


class Link:
    """Receives the messages of a mesh's agents, and carries out the core's effects.

    Args:
        owner: of the link.
        core: decides; used by the loop only.
        agent_end: a descriptor that can be read once the agent has ended, which ends the mesh.
    """

    def __init__(self, owner: Owner, core: Core, agent_end: int) -> None:
        self._owner = owner
        self._others: Printer | None = None
        self._core = core
        self._runs: dict[int, Run[Any]] = {}
        self._printers: dict[int, Printer] = {}
        self._ended = {is_cell: collections.deque[int]() for is_cell in (False, True)}
        self._timed: dict[int, Printer] = {}
        self._answers: dict[int, Reply[Any]] = {}
        self._commands: list[Command] = []
        # Reentrant: a finalizer of user code, which may run anywhere, may post a command.
        self._lock = threading.RLock()
        self._is_roused = False  # the loop will look at the commands
        self._agent = agent_end
        self._agent_has_ended = False
        self._closing = False
        self._due = 0.0  # when the loop must look around at the latest
        self._loop = Loop()
        self.check_may_wait = self._loop.check_may_wait
        self._faults, self._num_faults = Faults("the notebook's link to the mesh", warn), 0
        self._thread = threading.Thread(target=self._serve, name="cellmesh-link", daemon=True)

    def start(self) -> None:
        """Start the link's thread; it may call the given callbacks from now on."""
        self._thread.start()

    # ---- from any thread

    def post(self, command: Command) -> None:
        """Have the link's loop give the core a command; returns at once.

        Raises:
            NoMeshError: the link has been closed.
            MeshUsageError: this is a process forked from the one that has the link.
        """
        if os.getpid() != self._loop.pid:
            self._loop.check_pid()
        with self._lock:
            if self._closing:
                raise NoMeshError(
                    "the mesh has ended: start another with `%dist_start` or cellmesh.start()"
                )
            self._commands.append(command)
            if not self._is_roused:  # Ctrl-C before this: the next command rouses it
                self._loop.rouse()
                self._is_roused = True

    def submit(self, run: Run[Any], parcel: Parcel[Relay]) -> None:
        """Register a run with the link, then have the core send its work; returns at once.

        Raises:
            NoMeshError, MeshUsageError: as `post`.
        """

        def start(core: Core, now: float) -> Sequence[Effect]:
            self._runs[run.number] = run
            self._printers[run.number] = run.printer
            return core.submit(parcel, now)

        self.post(start)

    def has(self, number: int) -> bool:
        """Return whether a run was sent and has not ended; called in the loop."""
        return number in self._runs

    def ask(self, question: Callable[[Core, float], tuple[int, Sequence[Effect]]]) -> Reply[Any]:
        """Have the core ask a question; return the reply, which is None if the mesh ends."""
        reply: Reply[Any] = Reply()

        def put(core: Core, now: float) -> Sequence[Effect]:
            try:
                request, effects = question(core, now)
            except Exception as error:
                reply.fail(error)  # else it would be waited for without end
                return []
            self._answers[request] = reply
            return effects

        try:
            self.post(put)
        except NoMeshError:
            reply.give(None)
        return reply

    def is_in_loop(self) -> bool:
        """Return whether the calling thread is in a callback of the link's loop."""
        return threading.get_ident() == self._loop.thread

    def close(self) -> None:
        """End the link's thread and close its sockets, as when the mesh ends; waits for both.

        Not from the link's own thread.
        """
        with self._lock:
            self._closing = True
            self._loop.rouse()
        self._thread.join()

    # ---- the loop

    def _serve(self) -> None:
        """Run the loop on the link's thread until the end of the mesh."""
        connection, problem = None, ""
        try:
            connection = self._owner.connect()
        except Exception as error:  # this process may have no more sockets
            problem = str(error)
            self._loop.begin(())
        else:
            self._loop.begin((*connection.descriptors(), self._agent))
            while not self._is_over():
                self._turn(connection)
        with self._lock:
            self._closing = True
        self._faults.guard(self._serve_rest, connection, problem)
        if connection is not None:
            self._faults.guard(connection.close)
        with self._lock:
            self._loop.close()
        os.close(self._agent)
        self._faults.guard(self._owner.note_closed)

    def _is_over(self) -> bool:
        return self._closing or self._core.has_ended

    def _turn(self, connection: Connections) -> None:
        """Wait for something to do, and do it. Nothing that callbacks raise ends the loop, whose
        end would leave all threads waiting: not `SystemExit` either.
        """
        try:
            for number in self._loop.wait(self._due):
                if number == self._agent:
                    self._agent_has_ended = True
                    self._loop.forget(number)
                else:
                    connection.note_ready(number)
            self._step(connection)
            self._due = self._next_deadline(connection)
        except BaseException as error:
            self._faults.take(error)
            self._due = time.monotonic() + _PAUSE_S

    def _step(self, connection: Connections) -> None:
        """Execute commands, read messages and carry out effects until there are none."""
        while True:
            now = time.monotonic()
            effects: list[Effect] = self._obey(now) if self._commands else []
            num_heard = self._hear(connection, effects, now)
            if self._agent_has_ended and not num_heard:  # only once nothing is left to read
                effects += self._core.agent_ended("its agent's process ended")
            try:
                effects += self._core.tick(now)
            except Exception as error:
                self._faults.take(error)
            if effects or self._timed:
                self._carry_out(effects, connection, now)
            connection.tick(now)
            if self._core.has_ended or not (self._commands or connection.is_readable()):
                return

    def _hear(self, connection: Connections, effects: list[Effect], now: float) -> int:
        """Have the core handle each message that has arrived; return how many there were."""
        num_heard = 0
        try:
            for parcel in connection.hear(now):
                num_heard += 1
                try:
                    if type(parcel.verb) is Welcome:
                        self._take_over(parcel.verb)
                    if type(parcel.verb) is AgentFault:
                        warn(parcel.verb.text)
                    else:
                        if type(parcel.verb) is HostLost:
                            warn(parcel.verb.describe())
                        effects += self._core.receive(parcel, now)
                except Exception as error:
                    self._faults.take(error)
        except ProtocolError as error:
            effects += self._core.agent_ended(str(error))
        except Exception as error:
            self._faults.take(error)
        return num_heard

    def _serve_rest(self, connection: Connections | None, problem: str) -> None:
        """Execute the commands posted before the end, and show the last output.

        Args:
            connection: None if it could not be made.
            problem: why not.
        """
        now = time.monotonic()
        effects = self._core.agent_ended(problem) if connection is None else []
        self._carry_out([*effects, *self._obey(now)], connection, now)
        for printer in self._timed.values():
            self._faults.guard(printer.show, now, True)

    def _obey(self, now: float) -> list[Effect]:
        with self._lock:
            commands, self._commands = self._commands, []
            self._is_roused = False
        effects: list[Effect] = []
        for command in commands:
            try:
                effects += command(self._core, now)
            except Exception as error:
                self._faults.take(error)
        return effects

    def _take_over(self, welcome: Welcome) -> None:
        adopted = self._owner.adopt(welcome)
        self._others = adopted.others
        for run in adopted.runs:
            self._runs[run.number] = run
            self._printers[run.number] = run.printer

    def _next_deadline(self, connection: Connections) -> float:
        due, num_faults = self._core.deadline(), self._faults.num
        at = connection.deadline()
        due = at if due is None or (at is not None and at < due) else due
        for printer in self._timed.values():
            at = printer.deadline()
            due = at if due is None or (at is not None and at < due) else due
        if due is None:
            return math.inf
        has_failed, self._num_faults = num_faults != self._num_faults, num_faults
        return max(due, time.monotonic() + _PAUSE_S) if has_failed else due

    def _carry_out(
        self, effects: Sequence[Effect], connection: Connections | None, now: float
    ) -> None:
        outgoing = []
        for effect in effects:
            if type(effect) is Send:
                outgoing.append(effect.parcel)
        if outgoing and connection is not None:
            try:
                connection.send(outgoing)
            except Exception as error:
                self._faults.take(error)
        for effect in effects:
            try:
                if type(effect) is not Send:
                    self._apply(effect, now)
            except BaseException as error:  # of a user's callback
                self._faults.take(error)
        for number, printer in list(self._timed.items()):
            due = printer.deadline()
            if due is not None and due <= now:
                self._faults.guard(printer.show, now)
                due = printer.deadline()
            if due is None:
                del self._timed[number]

    def _apply(self, effect: Effect, now: float) -> None:
        match effect:
            case Deliver(number, ranks, parcel, has_begun):
                self._deliver(number, ranks, parcel, now, has_begun)
            case Finish(number):
                self._finish(number, now)
            case Waiting(number, states):
                run = self._runs[number]
                run.printer.show(now)
                run.report_waiting(states)
            case Watch(number, states):
                if number in self._runs:
                    self._runs[number].show_live(states, now)
            case Judge(number, verdict):
                if number in self._runs:
                    self._runs[number].note_verdict(verdict)
            case Note(number, text):
                if number in self._printers:
                    self._printers[number].note(text, now)
            case Answer(request, value):
                reply = self._answers.pop(request, None)
                if reply is not None:
                    reply.give(value)
            case Change():
                if effect.state == "ended":
                    for reply in self._answers.values():
                        reply.give(None)
                    self._answers.clear()
                self._owner.note(effect)

    def _finish(self, number: int, now: float) -> None:
        run = self._runs.pop(number)
        self._owner.forget(number)  # before the run's end is seen
        ended = self._ended[run.is_cell]
        ended.append(number)
        if len(ended) > _MAX_ENDED:
            self._printers.pop(ended.popleft(), None)
        run.finish(now)

    def _deliver(
        self, number: int, ranks: tuple[int, ...], parcel: Parcel[Any], now: float, has_begun: bool
    ) -> None:
        if type(parcel.verb) in (Done, Failed, Died):
            self._runs[number].settle(ranks, parcel, now, has_begun)
            if type(parcel.verb) is Done:
                return
        elif type(parcel.verb) in (Logged, Freed):
            self._owner.take(number, ranks, parcel)
            return
        elif type(parcel.verb) in (InputRequest, InputCancelled):
            if number in self._runs:
                self._runs[number].ask(ranks, parcel.verb, now)
        else:
            printer = self._printers.get(number, self._others)
            if printer is not None:
                printer.feed(ranks, parcel.verb, now)
                self._timed[number] = printer
        if number in self._printers:
            self._timed[number] = self._printers[number]


def warn(text: str) -> None:
    """Print a text to the notebook's stderr or, if that fails, to the kernel's terminal."""
    try:
        print(text, file=sys.stderr, flush=True)
    except Exception:
        print(text, file=sys.__stderr__, flush=True)
