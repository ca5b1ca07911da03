"""The link to a mesh's agents: a thread that receives their messages, passes them to the
controller's state machine (`Core`), and carries out the effects that it returns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...errors import MeshUsageError, NoMeshError, ProtocolError
from ...stdlib import os, select, socket, threading, time
from ...wire.faults import Faults
from ..core.core import Answer, Change, Core, Effect, Send
from ..kernel import own_shell
from ..news import Reply
from ..output.console import in_terminal
from .hosts.connections import Connections
from .runs import Command, Runs

# Pause before a failed action that is still due is tried again.
_PAUSE_S = 0.1


class Owner(Protocol):
    """Protocol of the session that owns the link; its methods are called on the link's thread."""

    def connect(self) -> Connections:
        """Connect to the agents of the mesh."""

    def note(self, change: Change) -> None:
        """Handle a change of the mesh's state."""

    def note_closed(self) -> None:
        """Handle the end of the link's thread, after its sockets were closed."""


class Link:
    """The thread that passes messages of a mesh's agents to the controller's state machine
    (`Core`), and carries out the effects that it returns.

    Args:
        owner: the session that owns the link.
        core: the state machine of the controller; used by the link's thread only.
        agent_end: file descriptor that becomes readable at the end of the agent, which ends the
            mesh.
    """

    def __init__(self, owner: Owner, core: Core, agent_end: int) -> None:
        self._owner, self._core = owner, core
        self._runs: Runs  # given by `start`
        self._answers: dict[int, Reply[Any]] = {}
        self._commands: list[Command] = []
        self._nested: list[Command] | None = None  # that the command being executed has posted
        # Reentrant: a finalizer of user code, which may run anywhere, may post a command.
        self._lock = threading.RLock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_roused = False  # the loop was woken, and will read the commands
        self._agent, self._agent_has_ended = agent_end, False
        self._closing = False
        self._poll = select.poll()
        self._watched: dict[int, tuple[socket.socket, Callable[[], bool]]] = {}
        self._due = 0.0  # when the loop must act at the latest
        self._pid = os.getpid()
        self._faults, self._num_faults = Faults("the notebook's link to the mesh", warn), 0
        self._thread = threading.Thread(target=self._serve, name="cellmesh-link", daemon=True)

    def start(self, runs: Runs) -> None:
        """Start the link's thread, which from then on calls the owner and passes messages on to
        `runs`.
        """
        self._runs = runs
        self._thread.start()

    # ---- from any thread

    def post(self, command: Command) -> None:
        """Queue a command to the `Core`, which the link's thread executes; returns at once.

        Raises:
            NoMeshError: the link has been closed.
            MeshUsageError: this process was forked from the one that owns the link.
        """
        if os.getpid() != self._pid:
            raise self._refuse_fork()
        with self._lock:
            if self._closing:
                raise NoMeshError(
                    "the mesh has ended: start another with `%dist_start` or cellmesh.start()"
                )
            if self._nested is not None and self.is_in_loop():
                self._nested.append(command)  # before all that was posted later
                return
            self._commands.append(command)
            if not self._is_roused:  # Ctrl-C before this: the next command rouses it
                os.eventfd_write(self._wake, 1)
                self._is_roused = True

    def watch(self, watched: socket.socket, ready: Callable[[], bool]) -> None:
        """Have the link's thread call a function whenever a socket is readable, until it returns
        False, and then close the socket; at the end of the link, close it as well.

        Raises:
            NoMeshError: the link has been closed.
        """

        def begin(core: Core, now: float) -> Sequence[Effect]:
            self._watched[watched.fileno()] = watched, ready
            self._poll.register(watched, select.POLLIN)
            return ()

        self.post(begin)

    def ask(self, question: Callable[[Core, float], tuple[int, Sequence[Effect]]]) -> Reply[Any]:
        """Queue a request to ranks or the agent; return the reply to wait for, whose value is None
        if the mesh ends.
        """
        reply: Reply[Any] = Reply()

        def put(core: Core, now: float) -> Sequence[Effect]:
            try:
                request, effects = question(core, now)
            except Exception as error:
                reply.fail(error)  # otherwise the caller would wait forever
                return []
            self._answers[request] = reply
            return effects

        try:
            self.post(put)
        except NoMeshError:
            reply.give(None)
        return reply

    def is_in_loop(self) -> bool:
        """Return whether the caller runs on the link's thread, as callbacks do."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raise an error if the caller would wait forever, as a callback on the link's thread or a
        forked process does.

        Raises:
            MeshUsageError: the caller is a callback in the loop, or in a forked process.
        """
        if os.getpid() != self._pid:
            raise self._refuse_fork()
        if threading.current_thread() is self._thread:
            raise MeshUsageError(
                "a callback (`Run.on_end`) cannot wait for ranks: it is called where their "
                "answers arrive, and none would. `submit` there and give that run a callback, or "
                "wait on another thread"
            )

    def _refuse_fork(self) -> MeshUsageError:
        return MeshUsageError(
            f"this process ({os.getpid()}) was forked from the one that holds the mesh "
            f"({self._pid}), and cannot use it: call the mesh there, or in another process that "
            "has left it to itself (`mesh.detach()`), with cellmesh.attach()"
        )

    def close(self) -> None:
        """End the link's thread, which closes its sockets, and wait for its end.

        Must not be called on the link's thread itself.
        """
        with self._lock:
            if not self._closing:  # else the loop ends, or has ended
                self._closing = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    # ---- the loop

    def _serve(self) -> None:
        """Run the event loop of the link's thread until the mesh ends or the link is closed."""
        connection, problem = None, ""
        try:
            connection = self._owner.connect()
        except Exception as error:  # this process cannot open more sockets
            problem = str(error)
        else:
            for number in (self._wake, self._agent, *connection.descriptors()):
                self._poll.register(number, select.POLLIN)
            while not (self._closing or self._core.mesh.state == "ended"):
                self._turn(connection)
        with self._lock:
            self._closing = True
        self._faults.guard(self._serve_rest, connection, problem)
        if connection is not None:
            self._faults.guard(connection.close)
        for watched, _ in self._watched.values():
            self._faults.guard(watched.close)
        os.close(self._wake)
        os.close(self._agent)
        self._faults.guard(self._owner.note_closed)

    def _turn(self, connection: Connections) -> None:
        """Wait for an event, and handle it; an exception of a callback, even `SystemExit`, does not
        end the loop, as all other threads would wait forever.
        """
        try:
            left_s = self._due - time.monotonic()
            left_ms = None if left_s == math.inf else max(0, int(left_s * 1000 + 1))
            for number, _ in self._poll.poll(left_ms):
                if number == self._wake:
                    os.eventfd_read(number)
                elif number == self._agent:
                    self._agent_has_ended = True
                    self._poll.unregister(number)
                elif number in self._watched:
                    watched, ready = self._watched[number]
                    if not ready():
                        self._poll.unregister(number)
                        del self._watched[number]
                        watched.close()
                else:
                    connection.note_ready(number)
            self._step(connection)
            self._due = self._next_deadline(connection)
        except BaseException as error:
            self._faults.take(error)
            self._due = time.monotonic() + _PAUSE_S

    def _step(self, connection: Connections) -> None:
        """Execute queued commands, read messages and carry out effects until none are left."""
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
            if effects or self._runs.showing:
                self._carry_out(effects, connection, now)
            connection.tick(now)
            if self._core.mesh.state == "ended" or not (self._commands or connection.is_readable()):
                return

    def _hear(self, connection: Connections, effects: list[Effect], now: float) -> int:
        """Pass each message that has arrived to the `Core`, and return the number of messages."""
        num_heard = 0
        try:
            for parcel in connection.hear(now):
                num_heard += 1
                try:
                    effects += self._core.receive(parcel, now)
                except Exception as error:
                    self._faults.take(error)
        except ProtocolError as error:
            effects += self._core.agent_ended(str(error))
        except Exception as error:
            self._faults.take(error)
        return num_heard

    def _serve_rest(self, connection: Connections | None, problem: str) -> None:
        """Execute the commands that were queued before the loop ended, and show the runs' last
        output.

        Args:
            connection: the connections to the agents; None if they could not be opened.
            problem: the reason for that.
        """
        now = time.monotonic()
        effects = self._core.agent_ended(problem) if connection is None else []
        self._carry_out([*effects, *self._obey(now)], connection, now)
        for printer in self._runs.showing.values():
            self._faults.guard(printer.show, now, True)

    def _obey(self, now: float) -> list[Effect]:
        with self._lock:
            commands, self._commands = self._commands, []
            self._is_roused = False
        effects: list[Effect] = []
        for command in commands:
            self._nested = nested = [command]
            for each in nested:  # which grows
                try:
                    effects += each(self._core, now)
                except Exception as error:
                    self._faults.take(error)
        self._nested = None
        return effects

    def _next_deadline(self, connection: Connections) -> float:
        due = math.inf
        for at in (self._core.deadline(), connection.deadline(), self._runs.show_at):
            if at is not None and at < due:
                due = at
        has_failed, self._num_faults = self._faults.num != self._num_faults, self._faults.num
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
                if type(effect) is Change:
                    self._note(effect)
                elif type(effect) is Answer:
                    if (reply := self._answers.pop(effect.request, None)) is not None:
                        reply.give(effect.value)
                elif type(effect) is not Send:
                    self._runs.apply(effect, now)
            except BaseException as error:  # of a user's callback
                self._faults.take(error)
        if self._runs.showing:
            self._runs.show_due(now, self._faults)

    def _note(self, change: Change) -> None:
        if change.state == "ended":
            for reply in self._answers.values():
                reply.give(None)
            self._answers.clear()
        self._owner.note(change)


def warn(text: str, mesh: str = "") -> None:
    """Print a text to the notebook's stderr; if that fails, to the kernel's terminal.

    Args:
        text: the text.
        mesh: name of the mesh, so that a process without magics names commands; "" if none is.
    """
    if mesh and own_shell() is None:
        text = in_terminal(text, mesh)
    try:
        print(text, file=sys.stderr, flush=True)
    except Exception:
        print(text, file=sys.__stderr__, flush=True)
