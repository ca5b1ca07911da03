"""The control thread of a rank: answers the controller while the main thread is busy or blocked."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import ProtocolError, Released
from ...stdlib import os, signal, threading, time
from ...wire import payload
from ...wire.codec import Frame, Parcel, at_rank_for_control, encode
from ...wire.faults import Faults
from ...wire.groups import Blueprint, Describe
from ...wire.inspect import Refusal
from ...wire.messages import Done, Interrupt, Leave, Release, Request, Signal
from ...wire.peer_calls import Routed
from ...wire.status import Probe, RankState, Stacks, StackText
from ...wire.stopping import QUIET_MAX_S, Pause, Steps, StopState
from ...wire.stream import Channel
from ...wire.verbs import InputReply
from ..groups.ledger import GroupRecord
from ..linux_process import main_thread_sleeps, signal_own_group, start_thread, write_stderr
from .features import RankContext
from .imports import load
from .interrupts import DescriptionTimeout
from .memory import MemoryMeter
from .stack_inspection import Activity, StopPoint, Waited, format_stacks, look_at_main_thread
from .stdin import Asker
from .tasks import Call, describe_waiting, format_waiting
from .value_transfer import refusal

# Made before the fork: the types of its messages take milliseconds.
_CODEC = at_rank_for_control()
# How long an interrupted run may unwind before its collectives are cut; how long a user's handler
# of SIGINT and the description of a failure may take; when an interrupt that Python has dropped is
# sent again.
_UNWIND_S, _HANDLER_S, _DESCRIBE_S, _AGAIN_S = 0.4, 1.0, 3.0, 0.01
_LOOK_S = 0.02
# How long a rank that was interrupted together with all others may wait in an operation of the
# user's handlers, as the others may be about to join it.
_ALIGNED_S = 5.0
_NO_THREAD = (
    "nothing more can be looked at beside a cell: the limit on processes and threads is reached"
)


@dataclass(eq=False)
class ControlThread:
    """Answers a rank's control messages and stops its runs, even while its main thread is busy or
    blocked.
    """

    _channel: Channel
    _context: RankContext
    _asker: Asker
    _meter: MemoryMeter
    _calls: dict[int, Call] = field(default_factory=dict)  # calls that wait on this rank, by run

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._shell = self._context.shell
        self._groups = self._context.groups
        self._interrupts = self._context.interrupts
        self._device = self._context.device
        self._faults = Faults("a rank's control thread", _say)
        self._last_stop: tuple[int, StopPoint | None] = (-1, None)
        self._seen: tuple[int, Activity, float] | None = None
        self._seen_since = 0.0
        self._aligned_run = -1  # the last run that was interrupted on all ranks together
        # Runs to be stopped, each with the exception and the delay of the signal in seconds (None:
        # already signalled).
        self._stops: queue.SimpleQueue[tuple[int, type[KeyboardInterrupt], float | None]] = (
            queue.SimpleQueue()
        )
        self._interrupts.on_dropped = lambda run, kind: self._stops.put((run, kind, _AGAIN_S))
        self._interrupts.on_failure = lambda run: self._stops.put(
            (run, DescriptionTimeout, _DESCRIBE_S)
        )

    def start(self) -> None:
        """Start the rank's threads for control messages and for stopping runs, before user code can
        exhaust the number of threads.
        """
        gate = self._groups.ledger.gate
        gate.running = lambda: self._interrupts.running
        gate.is_pending, self._context.post = self._interrupts.is_pending, self._answer
        gate.counts = self._groups.counts
        gate.num_steps = self._context.steps.num_steps
        gate.is_in_step = self._context.steps.note_operation
        self._context.steps.pause = functools.partial(gate.enter, 2)
        gate.report = self._report_stop
        self._context.release_from = self._release_from
        self._context.stop = lambda run: self._stop(run, KeyboardInterrupt)
        gate.on_raise = self._groups.backward_passes.look_around
        threading.Thread(target=self._serve, name="cellmesh-control", daemon=True).start()
        threading.Thread(target=self._see_to_stops, name="cellmesh-stops", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                frames = self._channel.receive()
            except (EOFError, OSError):  # closed by user code: the agent ends the rank
                return
            except BaseException as error:
                # User code can raise in any thread (PyThreadState_SetAsyncExc).
                self._take(error)
                continue
            try:
                verbs = _CODEC.decode(frames)
            except ProtocolError as error:
                _say(str(error))
                continue
            for verb, buffers in verbs:
                try:
                    self._handle(verb, buffers)
                except BaseException as error:
                    # Objects of the user that a query reads may raise, or memory may run out.
                    self._take(error)

    def _take(self, error: BaseException) -> None:
        with contextlib.suppress(BaseException):  # the error's own code may raise
            self._faults.take(error)

    def stop_of(self, run: int) -> StopPoint | None:
        """Return how a run was stopped (interrupted, or released from waiting); None if it was not.
        Usable on any thread.
        """
        stopped, stop = self._last_stop
        if stopped == run:
            return stop
        task = self._interrupts.tasks.get(run)
        return None if task is None or task.kind is None else StopPoint(task.kind, Waited())

    def kind_of_stop(self, run: int) -> type[KeyboardInterrupt] | None:
        """Return the exception class by which a run was stopped; None if it was not stopped."""
        stop = self.stop_of(run)
        return stop.kind if stop is not None else None

    def _handle(self, verb: Any, buffers: tuple[Frame, ...]) -> None:
        match verb:
            case Interrupt():
                self._stop(verb.run, KeyboardInterrupt, verb.is_aligned)
            case Pause():
                self._groups.ledger.gate.close(verb.run, verb.owed)
                self._report_stop(verb.run)
            case Release():
                self._stop(verb.run, Released)
            case InputReply():
                self._asker.reply(verb.request, verb.text, verb.is_end)
            case Stacks():
                self._answer(
                    Parcel(
                        StackText(
                            verb.request,
                            format_stacks(self._shell, verb.all_threads)
                            + format_waiting(self._calls, self._shell),
                        )
                    )
                )
            case Describe():
                self._answer(Parcel(Blueprint(verb.request, self._groups.blueprint())))
            case Probe():
                self._answer(Parcel(self._state(verb.request)))
            case Request():  # on another thread, as statistics may take long
                if not start_thread(self._answer_query, verb):
                    pickled, _ = payload.dumps(Refusal("RuntimeError", _NO_THREAD), "the answer")
                    self._answer(Parcel(Done(verb.run, pickled)))
            case Routed():
                load("rank.relayed").hear(self._context, verb, buffers)
            case Signal():
                os.kill(os.getpid(), verb.number)
            case Leave():
                self._leave()

    def _leave(self) -> None:
        try:
            # Not of a script that is killed, or whose main thread runs them.
            if sys.modules.get("__main__") is self._shell.user_module:
                atexit._run_exitfuncs()
        finally:
            os._exit(0)

    def _answer(self, parcel: Parcel[Any]) -> None:
        with self._lock:
            self._channel.send(encode([parcel]))

    def _answer_query(self, verb: Request) -> None:
        try:
            self._answer(self._query(verb))
        except BaseException as error:
            self._take(error)

    def _report_stop(self, run: int) -> None:
        """Send the controller the point that a rank has reached in a run that is to pause; called
        on the control thread, and on threads that begin a collective.
        """
        with self._interrupts, self._lock:
            gate, ledger = self._groups.ledger.gate, self._groups.ledger
            is_own = threading.get_ident() == ledger.main_thread
            waits = not (gate.is_paused or is_own) and self._waits(look_at_main_thread(self._shell))
            last = ledger.last
            quiet_s = QUIET_MAX_S if last is None else time.monotonic() - last.since
            steps = self._context.steps
            state = StopState(
                run,
                gate.is_paused,
                bool(waits),
                steps.is_inside,
                round(min(quiet_s, QUIET_MAX_S), 1),
                (*self._groups.counts(),),
                steps.describe(self._shell.user_ns),
                last is not None and last.since > ledger.before_run,
            )
            self._channel.send(encode([Parcel(state)]))

    def _release_from(self, record: GroupRecord, before: float, why: str) -> None:
        """Release the main thread if it waits, or has just failed, in an operation on a group that
        it began before a time.
        """
        run, waited = self._interrupts.running, self._waits(look_at_main_thread(self._shell))
        is_there = waited is not None and waited.group == record.name
        if run >= 0 and waited and is_there and time.monotonic() - waited.waited_s < before:
            named = replace(waited, collective=f"{waited.collective} ({why})")
            self._stop(run, Released, waited=named)

    def _stop(
        self,
        run: int,
        kind: type[KeyboardInterrupt],
        is_aligned: bool = False,
        waited: Waited | None = None,
    ) -> None:
        if self._interrupts.running != run:
            self._interrupts.request(run, kind)  # the run will not begin, or it waits
            return
        self._aligned_run = run if is_aligned else -1
        self._groups.ledger.num_doubts += 1
        if self._groups.ledger.gate.strike(run, kind):
            self._last_stop = (run, StopPoint(kind, Waited()))
            self._stops.put((run, kind, None))
            return
        waited = waited or self._waits(look_at_main_thread(self._shell))
        self._last_stop = (run, StopPoint(kind, waited or Waited()))
        if not is_aligned and waited is not None and self._groups.release():
            # The collective raises, and its error unwinds as any other. A signal now would be
            # pending, and strike in the first ``__exit__`` on the way: `torch.no_grad()` would
            # stay in effect.
            self._stops.put((run, kind, _UNWIND_S))
        else:
            self._signal(run, kind)

    def _signal(self, run: int, kind: type[KeyboardInterrupt]) -> None:
        if self._interrupts.request(run, kind):
            # Child processes that it waits for (`os.system`, a pipeline) have to end, too; a
            # terminal would signal the whole group.
            signal_own_group(signal.SIGINT)
            self._stops.put((run, kind, None))

    def _see_to_stops(self) -> None:
        """Enforce stops of runs: signal the main thread if a run continues after its collective was
        aborted, or if rendering its exception takes too long; abort the collective of a main thread
        that does not handle the signal.
        """
        while True:
            try:
                run, kind, after_s = self._stops.get()
                if after_s is None:
                    self._free_if_stuck(run)
                elif self._ends_within(run, after_s):
                    continue
                elif kind is DescriptionTimeout:
                    if self._interrupts.limit_description(run):
                        self._free_if_stuck(run, describe_s=0.0)
                else:
                    self._signal(run, kind)
            except BaseException as error:
                self._take(error)

    def _ends_within(self, run: int, limit_s: float) -> bool:
        """Wait until a run ends, at most `limit_s`; return whether it has ended."""
        until = time.monotonic() + limit_s
        while self._interrupts.running == run and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return self._interrupts.running != run

    def _free_if_stuck(self, run: int, describe_s: float = _DESCRIBE_S) -> None:
        """Abort the collective in which the main thread waits in C++, if it does not handle its
        signal.

        Code that handles a received interrupt (an ``except`` that saves a checkpoint) is left to
        run, unless it waits in a collective again; C++ code that computes is waited for. If user
        code handles, ignores or blocks SIGINT, another signal follows.
        """

        def release() -> int:
            # This thread may be late, and the main thread wait in its next run.
            return self._groups.release(lambda: self._interrupts.running == run)

        asked_at = time.monotonic()
        while not (self._waits_in_vain(run) and release()):
            # A dropped interrupt is queued to be sent again.
            if self._ends_within(run, _UNWIND_S) or not self._stops.empty():
                return
            if self._interrupts.is_pending(run):
                may_take_s = _HANDLER_S if self._interrupts.is_handled_by_user() else 0.0
                grace_s = describe_s if self._interrupts.is_describing else may_take_s
                if time.monotonic() - asked_at > grace_s:
                    self._interrupts.insist(run)
                    if self._ends_within(run, _LOOK_S):
                        return
                if (
                    self._interrupts.is_pending(run)
                    and not self._interrupts.is_describing  # it makes several attempts
                    and main_thread_sleeps()
                    and release()
                ):
                    return

    def _waits_in_vain(self, run: int) -> bool:
        waited = self._waits(look_at_main_thread(self._shell))
        may_wait_s = _ALIGNED_S if run == self._aligned_run else 0.0
        return waited is not None and waited.waited_s >= may_wait_s

    def _waits(self, seen: Activity) -> Waited | None:
        """Return the collective in which the main thread waits; None if it does not wait in one."""
        making = self._groups.making
        if making is not None and seen.collective:
            waited_s = time.monotonic() - making.since
            on = f" on the {making.label}" if making.label else ""
            return Waited(seen.collective + on, making.name, waited_s, making.ranks)
        operation, waits = self._groups.ledger.current(), bool(seen.collective)
        if self._groups.ledger.has_lost_peers:  # it waits to be stopped
            operation, waits = self._groups.ledger.last, True
        if operation is not None and (waits or (seen.may_wait and main_thread_sleeps())):
            name = operation.name if seen.collective in ("", "wait") else seen.collective
            name += f" on the {operation.record.label}" if operation.record.is_linked else ""
            return Waited(name, operation.group, time.monotonic() - operation.since)
        if seen.collective:  # waits for a store
            return Waited(seen.collective, "", self._since_seen(seen))
        return None

    def _since_seen(self, seen: Activity) -> float:
        """Return for how many seconds the main thread has been seen at its current line without
        beginning a collective.

        Between two operations of a loop, it is in the same call without having waited.
        """
        now = time.monotonic()
        operation = self._groups.ledger.last
        place = (self._interrupts.running, seen, operation.since if operation is not None else 0.0)
        if self._seen != place:
            self._seen, self._seen_since = place, now
        return now - self._seen_since

    def _state(self, request: int) -> RankState:
        run = self._interrupts.running
        seen = look_at_main_thread(self._shell)
        waited = self._waits(seen) or Waited()
        task = self._interrupts.tasks.get(run)
        if task is not None and task.interleaves and not waited.collective:
            run = -1  # it is about to wait again
        busy, memory = run >= 0, self._meter.use()
        return RankState(
            request=request,
            run=run,
            execution_count=seen.execution_count if busy else 0,
            line=seen.line if busy else 0,
            inner=seen.inner if busy else "",
            where=seen.where if busy else "",
            collective=waited.collective if busy else "",
            device=str(self._device),
            device_bytes=memory.reserved,
            group=waited.group if busy else "",
            waited_s=waited.waited_s if busy else 0.0,
            asks=self._asker.is_asking,
            is_broken=self._groups.is_broken,
            is_half_done=self._groups.is_half_done,
            making=waited.making if busy else (),
            # Of an idle rank, too: others may wait in an operation instead of which it began
            # another.
            counts=(*self._groups.counts(with_recent=True),),
            memory=memory,
            in_flight=self._groups.ledger.in_flight() if waited.collective else (),
            steps=Steps() if busy else self._context.steps.describe(self._shell.user_ns),
            waiting=describe_waiting(self._calls, self._shell) if self._calls else (),
            peer=self._context.describe_wait() if busy else "",
            serves=self._context.serving() if busy else None,
        )

    def _query(self, verb: Request) -> Parcel[Done]:
        """Return the answer to a query of the controller; if its handler raised an exception, the
        exception as a `Refusal`.
        """
        try:
            answer = self._context.find_handler(verb.body).handle_beside(verb.body)
            pickled, buffers = payload.dumps(answer, "the answer")
        except BaseException as error:
            pickled, buffers = payload.dumps(refusal(error), "the answer")
        return Parcel(Done(verb.run, pickled), tuple(buffers))


def _say(text: str) -> None:
    write_stderr(f"cellmesh: {text}\n")
