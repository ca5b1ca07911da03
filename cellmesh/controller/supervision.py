"""Makes actors again on ranks that have replaced dead ones (``on_death`` of `Ranks.spawn`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CellmeshError, MeshUsageError, RankFailure
from ..stdlib import threading, time
from ..wire.messages import Died, Respawned, RespawnFailed
from ..wire.ranks import describe_ranks, with_verb
from .actor_records import keep
from .core.effects import Change
from .failure_summary import describe_end, is_released
from .news import News
from .output.calling_cell import current_sink
from .output.console import Unremarked

if TYPE_CHECKING:
    from .run import Run
    from .session.session import Session

# `controller.actors.Spawned`, whose module imports this one.
Spawned = Any
# An actor is made again at most so often within so many seconds.
MAX_RESTARTS, WINDOW_S = 3, 60.0


def may_restart(restarted_at: Sequence[float], now: float) -> bool:
    """Return whether an actor may be made again.

    Args:
        restarted_at: when it was made again before, in seconds.
        now: current time in seconds.
    """
    return sum(now - at < WINDOW_S for at in restarted_at) < MAX_RESTARTS


def check_on_death(on_death: Any, kind: type) -> None:
    """Raise an error unless these are arguments of `Ranks.spawn` that can be used.

    Raises:
        MeshUsageError: `on_death` is unknown, or the class's ``checkpoint_every`` no number.
    """
    if on_death not in ("fail", "restart") and not callable(on_death):
        raise MeshUsageError(
            f"on_death={on_death!r}: 'fail', 'restart', or a function of the actor and its new "
            "ranks, which is called once they have the actor again"
        )
    every = getattr(kind, "checkpoint_every", 0)
    if type(every) is not int or every < 0:
        raise MeshUsageError(
            f"{kind.__name__}.checkpoint_every is {every!r}: the number of calls after which a "
            "rank saves the actor's state"
        )


class Supervisor:
    """Has dead ranks of a mesh replaced if actors with ``on_death="restart"`` or a function are on
    them, and makes these actors again, on a thread that lives as long as it has to do. The user's
    functions have threads of their own, so that none holds up another restart.

    Args:
        session: session of the mesh.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._deaths: dict[int, tuple[float, str]] = {}  # rank -> when and how it ended last
        self._new: set[int] = set()  # ranks that have replaced others
        self._lock = threading.Lock()  # of these two and the thread
        self._thread: threading.Thread | None = None
        self._ends = News()  # of the thread
        self._turn = threading.Lock()  # of making actors again, and of a heal by hand
        self._called: dict[threading.Thread, str] = {}  # the user's functions that run
        self._left: set[threading.Thread] = set()  # those for which heals wait no longer

    def watch(self, spawned: Spawned) -> None:
        """Make a new actor again on its ranks that have died or were replaced since it was made."""
        for rank in self._session.dead_ranks.intersection(spawned.rank_set.ranks):
            self.note_death(rank, self._session.why_dead(rank))
        if spawned.lost:
            self._begin({*spawned.lost})

    # ---- for the link, on its thread

    def note(self, change: Change) -> None:
        """Handle the death or the replacement of ranks."""
        match change.cause:
            case Died(rank, reason) if change.state == "ready":
                self.note_death(rank, reason)
            case Respawned(infos):
                self._begin({info.rank for info in infos})
            case RespawnFailed(ranks, text):
                for spawned in self._concerned(ranks):
                    lost = [rank for rank in spawned.rank_set.ranks if rank in ranks]
                    self._show(
                        f"{describe_ranks(lost)} of {spawned.name} could not be replaced: {text}. "
                        "`%dist_heal` tries again"
                    )

    def note_death(self, rank: int, reason: str) -> None:
        """Have a rank that has died replaced once no rank executes work, unless its actors were
        made again too often.
        """
        now = time.monotonic()
        self._deaths[rank] = now, reason
        for spawned in self._concerned((rank,)):
            if may_restart(spawned.restarted_at, now):
                self._session.runs.post_if_open(lambda core, now: core.replace((rank,), now))
            else:
                spawned.on_death = "fail"
                self._show(
                    f"{describe_end((rank,), reason)}: {spawned.name} was made again "
                    f"{MAX_RESTARTS} times within a minute, and is not now; mesh.spawn makes it on "
                    "all its ranks"
                )

    def _concerned(self, ranks: Collection[int]) -> list[Spawned]:
        """Return the actors to be made again that are on some of these ranks, in the order in which
        they were spawned.
        """
        actors: Sequence[Spawned] = [*self._session.actors.values()]
        return [
            each
            for each in actors
            if each.on_death != "fail" and not {*each.rank_set.ranks}.isdisjoint(ranks)
        ]

    def _begin(self, ranks: set[int]) -> None:
        with self._lock:
            self._new |= ranks
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="cellmesh-supervisor", daemon=True
                )
                self._thread.start()

    # ---- on its own thread

    def _serve(self) -> None:
        try:
            while True:
                with contextlib.suppress(CellmeshError):
                    if (recovery := self._session.recovery()) is not None:
                        recovery.wait()  # ranks that have died one after the other are one restart
                with self._turn:
                    with self._lock:
                        ranks, self._new = self._new, set()
                        if not ranks:
                            self._thread = None
                            return
                    for spawned in self._concerned(ranks):
                        if lost := tuple(sorted(spawned.lost - self._session.dead_ranks)):
                            self._restart(spawned, lost)
        finally:
            if self._thread is threading.current_thread():
                self._thread = None
            self._ends.report()

    def _restart(self, spawned: Spawned, ranks: tuple[int, ...]) -> None:
        """Make an actor again on new ranks, and have the user's function called if there is one."""
        deaths = {rank: self._deaths.get(rank) for rank in spawned.rank_set.ranks}
        spawned.restarted_at.append(time.monotonic())
        sink, is_restored = Unremarked(current_sink(self._session.displays)), False
        try:
            run = spawned.make(spawned.rank_set.part(ranks), is_again=True, sink=sink)
            is_restored, problem = _wait(run)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        end = functools.partial(self._end, spawned, ranks, deaths, is_restored)
        if problem or not callable(spawned.on_death):
            end(problem)
            return
        thread = threading.Thread(target=self._follow, args=(spawned, ranks, end), daemon=True)
        name = getattr(spawned.on_death, "__qualname__", "a function")
        self._called[thread] = f"{name}, the on_death of {spawned.name}"
        try:
            thread.start()
        except RuntimeError as error:  # the limit on threads
            del self._called[thread]
            end(str(error))

    def _follow(self, spawned: Spawned, ranks: tuple[int, ...], end: Callable[[str], None]) -> None:
        """Call the user's function on this thread, which may last as long as it likes."""
        problem, spawned.restarter = "", threading.get_ident()
        try:
            called = spawned.on_death(spawned.handle(), ranks)
            if inspect.iscoroutine(called):
                asyncio.run(called)
        except BaseException as error:
            rest = error.__traceback__ and error.__traceback__.tb_next
            problem = "".join(traceback.format_exception(error.with_traceback(rest)))
            problem = f"the function that follows a death has raised:\n{problem}"
        try:
            end(problem)
        finally:
            if spawned.restarter == threading.get_ident():
                spawned.restarter = 0
            del self._called[threading.current_thread()]
            self._ends.report()

    def _end(
        self, spawned: Spawned, ranks: tuple[int, ...], deaths: dict[int, tuple[float, str] | None],
        is_restored: bool, problem: str,
    ) -> None:  # fmt: skip
        """Show that an actor was made again, or why it is lost (`problem`)."""
        has_ended = self._session.core.state != "ready" or spawned.why_ended
        if has_ended or any(self._deaths.get(rank) is not deaths[rank] for rank in deaths):
            return  # ranks that have died by now are replaced, and the actor is made again
        if problem:
            spawned.on_death = "fail"
            with contextlib.suppress(CellmeshError):
                spawned.start("drop", ("drop",), spawned.rank_set.part(ranks))
            self._show(
                f"{spawned.name} on {describe_ranks(ranks)} is lost, and mesh.spawn makes it again "
                f"on all its ranks: {problem}"
            )
        else:
            spawned.lost.difference_update(ranks)
            keep(spawned)
            self._show(_describe(spawned.name, ranks, deaths, is_restored))

    def _show(self, text: str) -> None:
        displays = self._session.displays
        head = displays.heading(True) if displays.heading is not None else ""
        with contextlib.suppress(Exception):
            current_sink(displays).note(f"{head} {text}".lstrip())

    # ---- beside a heal by hand

    @contextlib.contextmanager
    def around_heal(self) -> Iterator[None]:
        """Heal by hand while no actor is made again, and then wait until those on the new ranks
        are, or the user interrupts the wait.
        """
        if threading.current_thread() in self._called:  # a function of the user's heals
            yield
            return
        try:
            self._ends.wait_for(lambda: self._is_calm() and self._turn.acquire(blocking=False))
            try:
                yield
            finally:
                self._turn.release()
            self._ends.wait_for(lambda: self._thread is None and self._is_calm())
        except KeyboardInterrupt:
            if left := [name for thread, name in self._called.items() if thread not in self._left]:
                self._left.update(self._called)
                self._show(f"no heal waits any longer for {' and '.join(left)}, which runs on")
            raise

    def _is_calm(self) -> bool:
        """Return whether no function runs for which heals wait."""
        return self._called.keys() <= self._left


def _wait(run: Run[Any]) -> tuple[bool, str]:
    """Wait until an actor was made again; return whether ranks had saved its state, and why it was
    not, "" if it was.
    """
    try:
        return any(run.result().values()), ""
    except RankFailure as failure:
        if not any(map(is_released, run.outcomes().values())):
            return False, str(failure)
        return False, (
            f"{failure}. A constructor with collectives needs all ranks: call them in a method, "
            "and that in `on_death=lambda actor, ranks: actor.method()`, which has all ranks"
        )


def _describe(
    name: str,
    ranks: Sequence[int],
    deaths: dict[int, tuple[float, str] | None],
    is_restored: bool,
) -> str:
    """Return the line on actors that were made again."""
    known = [death for rank in ranks if (death := deaths[rank]) is not None]
    how = describe_end(ranks, known[0][1]) if known else with_verb(ranks, "is", "are") + " new"
    when = f" in {time.monotonic() - min(known)[0]:.1f} s" if known else ""
    saved = ", with its saved state" if is_restored else ""
    return f"{how}: replaced, and {name} made again there{when}{saved}"
