"""The runs (cells and calls) of one session: submits and numbers them, bounds how many are in
flight, passes them the messages of their ranks, and takes over the runs of an earlier controller.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import MeshUsageError, NoMeshError
from ...stdlib import time
from ...wire.attach import RunInfo, Welcome
from ...wire.codec import Parcel
from ...wire.faults import Faults
from ...wire.host import format_span
from ...wire.limits import COUNTED_BYTES, MAX_RUN_BYTES, MAX_RUNS, may_wait_for
from ...wire.messages import Died, Done, Failed
from ...wire.peer_calls import PeerWork, Routed
from ...wire.ranks import describe_ranks
from ...wire.status import RankState
from ...wire.values import PullNames
from ...wire.verbs import Imports, InputCancelled, InputRequest, Logged, RunCall, RunCell
from ..core.core import Core, Deliver, Effect, Finish, Judge, Note, Watch
from ..failure_summary import refuse_dead
from ..metrics import Metrics
from ..news import News
from ..output.console import ConsoleSink, SilentSink, Sink, Unremarked
from ..output.fold import Block
from ..output.printer import Printer
from ..preload import Preloading
from ..run import Run, WorkItem
from .life import Life

if TYPE_CHECKING:
    from ..code_files.sync import CodeSync

Command = Callable[[Core, float], Sequence[Effect]]

# How often a thread that waits to submit a run asks ranks whether they wait for idle ones.
_LOOK_UP_S = 0.5


# Threads of user code may print long after the end of their run: the printers of this many ended
# runs are kept, of the newest cells and of the newest calls.
_MAX_ENDED = 256


class Owner(Protocol):
    """Protocol of the session that owns the runs."""

    life: Life
    core: Core
    code: CodeSync | None
    metrics: Metrics
    preloading: Preloading
    router: Any  # a `controller.routing.Router`
    links: dict[str, Any]  # of `links.MeshLink`
    name: str

    def states(self, ranks: Sequence[int]) -> Mapping[int, RankState]:
        """Ask ranks for the states of their main threads, and return the answers."""


class Poster(Protocol):
    """Protocol of the operations of `Link` that `Runs` uses."""

    def post(self, command: Command) -> None:
        """Queue a command to the `Core`, which the link's thread executes; returns at once."""

    def is_in_loop(self) -> bool:
        """Return whether the caller runs on the link's thread, as callbacks do."""

    def check_may_wait(self) -> None:
        """Raise an error if the caller would wait forever, as a callback on the link's thread or a
        forked process does.
        """


class HeadedSink(Unremarked):
    """A receiver of output that shows a heading before the first output.

    Args:
        sink: receives the heading and all output.
        heading: text of the heading.
    """

    def __init__(self, sink: Sink, heading: str) -> None:
        super().__init__(sink)
        self._heading = heading

    def show(self, blocks: Sequence[Block]) -> None:
        self._show_heading()
        super().show(blocks)

    def note(self, text: str) -> None:
        self._show_heading()
        self._sink.note(text)

    def _show_heading(self) -> None:
        heading, self._heading = self._heading, ""
        if heading:
            self._sink.note(heading)


def heading_for(welcome: Welcome) -> str:
    """Return the heading of output that the agent kept while no controller was attached."""
    away = format_span(welcome.away_s)
    return f"nobody was attached for {away}; what the ranks have shown since:"


class Runs:
    """The runs (cells and calls) of one session, usable on any thread; each `Run` uses it as its
    `RunControl`.

    Args:
        session: the session of the mesh.
        link: the link to the agents.
        num_ranks: number of ranks of the mesh.

    Attributes:
        living: the runs in flight by number, in the order of submission.
        showing: the printers with output that is held back, by the number of the run.
        show_at: when `show_due` must be called at the latest; None if nothing is held back.
    """

    def __init__(self, session: Owner, link: Poster, num_ranks: int) -> None:
        self._session, self._link = session, link
        self.num_ranks = num_ranks
        self._lock = threading.Lock()
        self._num_runs = 0
        self._num_cells = 0
        self.living: dict[int, Run[Any]] = {}
        self._num_bytes: dict[int, int] = {}  # run -> size of its arguments, unless small
        self._ends = News()  # ends of runs
        self._adopted: tuple[Run[Any], ...] = ()
        self._printers: dict[int, Printer] = {}  # of runs that were sent
        self._ended = {is_cell: collections.deque[int]() for is_cell in (False, True)}
        self._others: Printer | None = None  # of runs of earlier controllers
        self.showing: dict[int, Printer] = {}
        self.show_at: float | None = None
        self.check_may_wait = link.check_may_wait

    # ---- submitting

    def check_usable(self, ranks: Sequence[int]) -> None:
        """Raise an error unless all of these ranks can execute runs.

        Raises:
            NoMeshError: the mesh is not ready.
            MeshUsageError: the mesh no longer has one of the ranks.
            RankDied: one of the ranks is dead.
        """
        life, core = self._session.life, self._session.core
        if life.state != "ready":
            raise life.refuse_use()
        if max(ranks, default=0) >= self.num_ranks:
            beyond = [rank for rank in ranks if rank >= self.num_ranks]
            raise MeshUsageError(
                f"there is no {describe_ranks(beyond)} any more: the mesh has {self.num_ranks} "
                "ranks since its last `%dist_resize`"
            )
        if core.mesh.dead and (dead := [rank for rank in ranks if rank in core.lost]):
            raise refuse_dead(dead, core.dead[dead[0]])

    def start_run(self, item: WorkItem, printer: Printer) -> Run[Any]:
        """Send work to ranks as a run; waits while too much work is in flight (`make_room`).

        Args:
            item: the work.
            printer: shows the run's output.

        Raises:
            NoMeshError: the mesh has ended.
            RankDied: one of the ranks is dead.
        """
        is_full = len(self.living) >= MAX_RUNS or item.num_bytes >= COUNTED_BYTES
        if is_full and item.kind.needs_room:
            self.make_room(item.ranks, item.num_bytes)
        self.check_usable(item.ranks)
        code = self._session.code
        if code is not None and item.kind.fills and not self._link.is_in_loop():
            code.bring(not item.kind.is_cell)
        with self._lock:
            self._num_runs += 1
            number = self._num_runs
        run: Run[Any] = Run(number, item, printer, self)
        parcel = item.relay(number)

        def send(core: Core, now: float) -> Sequence[Effect]:
            self._printers[number] = printer
            return core.submit(parcel, now)

        try:
            self.add(run, item.num_bytes)
            if run.is_cell:
                run.on_end(self._session.metrics.settle)
            self._link.post(send)
        except BaseException:  # Ctrl-C, before or after it was sent
            self.post_if_open(lambda core, now: self._forget_unsent(number))
            raise
        return run

    def make_room(self, ranks: Sequence[int], num_bytes: int) -> None:
        """Wait until a run with this many bytes of arguments may be sent (`has_room`); stop waiting
        if a rank waits for idle ranks, which may need this very run to go on.

        Ctrl-C ends the wait. A callback in the link's loop does not wait, as only that loop
        receives the answers that make room.

        Raises:
            NoMeshError: the mesh is not ready.
            RankDied: one of the ranks is dead.
        """

        def may_go_on() -> bool:
            return self._session.life.is_over() or self.has_room(ranks, num_bytes)

        self.check_usable(ranks)
        if self._link.is_in_loop():
            return
        all_ranks = range(self.num_ranks)
        while not may_go_on():
            until = time.monotonic() + _LOOK_UP_S
            self._ends.wait_for(may_go_on, _LOOK_UP_S)
            if time.monotonic() >= until:
                idle = set(all_ranks) - self.busy_ranks()
                states = self._session.states(all_ranks)
                if any(may_wait_for(state, idle) for state in states.values()):
                    return

    def _forget_unsent(self, number: int) -> Sequence[Effect]:
        """Remove a run that was never sent from the runs in flight, as it would keep its ranks busy
        forever.
        """
        if number not in self._printers:
            self.forget(number)
        return ()

    # ---- commands

    def post_if_open(self, command: Command) -> None:
        """Queue a command to the `Core`, unless the link to the agents is closed."""
        with contextlib.suppress(NoMeshError):
            self._link.post(command)

    def wait_for(self, number: int) -> None:
        """Inform the `Core` that the caller waits for a run on some ranks, and submits nothing else
        until it ends.
        """
        self.post_if_open(lambda core, now: core.wait_for(number))

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        """Inform the `Core` that the user waits for a run on these ranks, and submits nothing else
        until it ends.
        """
        if len(ranks) < self.num_ranks:  # otherwise no other rank could be needed
            self.wait_for(number)

    def interrupt(self, runs: Sequence[Run[Any]]) -> None:
        """Interrupt these runs, which are ordered oldest first, without waiting for their ends."""
        for run in runs:
            run.note_interrupted()
        numbers = [run.number for run in reversed(runs)]
        self.post_if_open(lambda core, now: core.interrupt(numbers, now))

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        """Interrupt a run, and the older queries in flight on its ranks, for which it may wait."""
        self.give_up(number)
        for run in self.on(ranks):
            if run.is_query and run.number < number:
                self.give_up(run.number)

    def give_up(self, number: int) -> None:
        """Interrupt a run whose user has stopped waiting for it."""
        self.post_if_open(lambda core, now: core.interrupt([number]))

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        """Send the user's input to the ranks that requested it; `requests` maps rank to request
        number.
        """
        self.post_if_open(lambda core, now: core.reply(requests, text, is_end))

    # ---- in flight

    def add(self, run: Run[Any], num_bytes: int = 0) -> None:
        """Register a run as in flight until `forget`, with the size of its arguments in bytes."""
        self.living[run.number] = run
        if num_bytes >= COUNTED_BYTES:
            self._num_bytes[run.number] = num_bytes

    def has_room(self, ranks: Iterable[int], num_bytes: int) -> bool:
        """Return whether another run with this many bytes of arguments may be sent to these ranks.

        The run that a rank may be executing does not count, and one more may always wait: runs on
        several ranks may have to meet in a collective.
        """
        if len(self.living) >= MAX_RUNS:
            return False
        sizes = self._num_bytes.copy()
        if num_bytes < COUNTED_BYTES or sum(sizes.values()) + num_bytes <= MAX_RUN_BYTES:
            return True
        waiting: dict[int, list[int]] = {rank: [] for rank in ranks}
        for number, each in sizes.items():
            run = self.living.get(number)
            for rank in run.waiting_ranks() if run is not None else ():
                if rank in waiting:
                    waiting[rank].append(each)
        return all(
            len(own) < 2 or sum(own[1:]) + num_bytes <= MAX_RUN_BYTES for own in waiting.values()
        )

    def count_cell(self) -> int:
        """Count a cell that no notebook has numbered, and return its execution count."""
        self._num_cells += 1
        return self._num_cells

    def all(self) -> tuple[Run[Any], ...]:
        """Return the runs in flight, oldest first; after an attach, also the runs that were in
        flight at the attach.
        """
        runs = {run.number: run for run in (*self._adopted, *self._in_flight())}
        return tuple(run for _, run in sorted(runs.items()))

    def on(self, ranks: Iterable[int]) -> list[Run[Any]]:
        """Return the runs in flight on any of these ranks, oldest first."""
        wanted = set(ranks)
        return [run for run in self._in_flight() if wanted.intersection(run.waiting_ranks())]

    def busy_ranks(self) -> set[int]:
        """Return the ranks that have not ended all their runs; queries do not count, nor calls
        that wait beside work.
        """
        return {
            rank
            for run in self._in_flight()
            if not (run.is_query or run.interleaves)
            for rank in run.waiting_ranks()
        }

    @property
    def has_user_code(self) -> bool:
        """Whether a run other than a query is in flight."""
        return not all(run.is_query for run in self._in_flight())

    def adopt(self, welcome: Welcome, sink: Sink) -> None:
        """Take over the runs in flight of an earlier controller, and number new runs after them.

        Args:
            welcome: the agent's message that lists the runs.
            sink: sink of the cell that attaches to the mesh.
        """
        with self._lock:
            self._num_runs = max(self._num_runs, welcome.next_run - 1)
        self._num_cells = max(
            (info.execution_count for info in welcome.runs), default=self._num_cells
        )
        if welcome.next_run == 1:  # there was no controller before
            return
        headed = HeadedSink(sink, heading_for(welcome))
        self._adopted = tuple(
            self._adopt_run(info, Printer(info.ranks, headed)) for info in welcome.runs
        )
        self._others = Printer(range(self.num_ranks), headed)

    def _adopt_run(self, info: RunInfo, printer: Printer) -> Run[Any]:
        kind = RunCell if info.execution_count else RunCall
        # Another controller has sent the work; only its kind is known.
        work, title = PullNames(info.run, ""), info.title or "a call"
        item = WorkItem(work, kind, info.ranks, title=title, interleaves=info.interleaves)
        run: Run[Any] = Run(info.run, item, printer, self)
        self.add(run)
        self._printers[info.run] = printer
        return run

    def _join(self, call: PeerWork, ranks: tuple[int, ...]) -> None:
        """Register a call of another rank that these ranks execute; its caller gets the outcome."""
        run = self.living.get(call.run)
        if run is None:
            silent = Printer(range(self.num_ranks), Unremarked(SilentSink(ConsoleSink())), False)
            run = self._adopt_run(RunInfo(call.run, (), call.title), silent)
        run.ranks = (*run.ranks, *ranks)

    def forget(self, number: int) -> None:
        """Remove a run, which has ended, from the runs in flight."""
        self.living.pop(number, None)
        if self._num_bytes:
            self._num_bytes.pop(number, None)
        self._ends.report()

    def _in_flight(self) -> list[Run[Any]]:
        return list(self.living.copy().values())

    # ---- for the link, on its thread

    def apply(self, effect: Effect, now: float) -> None:
        """Carry out an effect of the `Core` that concerns a run, such as the delivery of a rank's
        message.
        """
        match effect:
            case Deliver(number, ranks, parcel, has_begun):
                self._deliver(number, ranks, parcel, now, has_begun)
            case Finish(number):
                run = self.living[number]
                self.forget(number)  # before the run's end is seen
                for link in [*self._session.links.values()] if self._session.links else ():
                    link.note_end(self._session.name, run)
                ended = self._ended[run.is_cell]
                ended.append(number)
                if len(ended) > _MAX_ENDED:
                    self._printers.pop(ended.popleft(), None)
                run.finish(now)
            case Watch(number, states):
                if number in self.living:
                    self.living[number].show_live(states, now)
            case Judge(number, verdict):
                if number in self.living:
                    self.living[number].note_verdict(verdict)
            case Note(number, text):
                if number in self._printers:
                    self._printers[number].note(text, now)

    def _deliver(
        self, number: int, ranks: tuple[int, ...], parcel: Parcel[Any], now: float, has_begun: bool
    ) -> None:
        kind = type(parcel.verb)
        if kind in (Done, Failed, Died):
            self.living[number].settle(ranks, parcel, now, has_begun)
            if kind is Done:
                return
        elif kind is PeerWork:
            self._join(parcel.verb, ranks)
            return
        elif kind is Logged:
            self._session.metrics.take(number, ranks, parcel)
            return
        elif kind is Routed:
            self._session.router.carry(self._session, ranks[0], parcel)
            return
        elif kind is Imports:
            note = self._session.preloading.take(ranks, parcel.verb, self.num_ranks)
            if note and number in self._printers:
                self._printers[number].note(note, now)
            return
        elif kind in (InputRequest, InputCancelled):
            if number in self.living:
                self.living[number].ask(ranks, parcel.verb, now)
        elif (others := self._printers.get(number, self._others)) is not None:
            others.feed(ranks, parcel.verb, now)
            self.showing[number] = others
        if number in self._printers:
            self.showing[number] = self._printers[number]

    def show_due(self, now: float, faults: Faults) -> None:
        """Show the held-back output of runs that is due, and set the time when further output is
        due.
        """
        self.show_at = None
        for number, printer in list(self.showing.items()):
            due = printer.deadline()
            if due is not None and due <= now:
                faults.guard(printer.show, now)
                due = printer.deadline()
            if due is None:
                del self.showing[number]
            elif self.show_at is None or due < self.show_at:
                self.show_at = due
