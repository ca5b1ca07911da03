"""What the core knows of its mesh: which ranks live, what they run, who holds back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...wire.messages import Died, MeshReady, RankInfo
from .effects import State
from .news import News

# Runs of the core's own (heals) are numbered from here.
FIRST_HEAL = 1 << 40


@dataclass
class Pending:
    """A run that has not ended on all its ranks.

    Attributes:
        members: all its ranks.
        ranks: those that have not ended it.
        started_at: when it was sent, in seconds.
        is_work: it is the main threads'; else the control threads answer it.
        is_sent: it has been sent, and does not wait for the mesh to be calm.
        has_failed: a rank has raised in it or died.
        first_end_at: when the first rank ended it.
        settle_at: when those that are left are released, or reported where nobody is released.
        released: who has been released.
        interrupted_at: when the user interrupted it.
        kill_at: when what has not stopped is killed, as the user pressed again.
        watched_at: when its user was last shown where its ranks are.
        was_in_step: an optimizer's step was left half way.
        is_waited_for: the user can do nothing else before it ends.
        fills: it may give its ranks what a user's namespace holds.
        title: what to call it.
    """

    members: tuple[int, ...]
    ranks: set[int]
    started_at: float
    is_work: bool = True
    is_sent: bool = True
    has_failed: bool = False
    first_end_at: float | None = None
    settle_at: float | None = None
    released: set[int] = field(default_factory=set)
    interrupted_at: float | None = None
    kill_at: float | None = None
    watched_at: float = 0.0
    was_in_step: bool = False
    is_waited_for: bool = False
    fills: bool = False
    title: str = ""

    @property
    def is_called_off(self) -> bool:
        """Whether its ranks have been released or interrupted, or will be."""
        return self.settle_at is not None or bool(self.released) or self.interrupted_at is not None

    def begin(self, now: float) -> None:
        """It is sent only now: what depends on how long it takes begins anew."""
        waited_s = now - self.started_at
        self.is_sent, self.started_at, self.watched_at = True, now, now
        if self.first_end_at is not None:
            self.first_end_at += waited_s
        if self.settle_at is not None:
            self.settle_at += waited_s


@dataclass
class Board:
    """The mesh as the core sees it.

    Attributes:
        num_ranks: number of ranks.
        state: where in its life the mesh is.
        dims: the DeviceMesh's, name -> size.
        ranks: as the agent told when the mesh became ready.
        dead: rank -> how it died.
        pending: run -> its state.
        held: ranks that hold back work -> the run that failed on them, -1 if that is not known.
        asking: rank -> the request by which it waits for the user.
        store_port: where the c10d store listens, 0 if that is as it was when the ranks were forked.
        news: of ranks that were replaced without being asked for.
    """

    num_ranks: int
    state: State = "connecting"
    dims: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[RankInfo, ...] = ()
    dead: dict[int, Died] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    asking: dict[int, int] = field(default_factory=dict)
    store_port: int = 0
    news: News = field(default_factory=News)

    def living(self) -> set[int]:
        """The ranks that have a process."""
        return {rank for rank in range(self.num_ranks) if rank not in self.dead}

    def among_living(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of some ranks that have a process."""
        return tuple(rank for rank in ranks if rank not in self.dead)

    def with_work(self) -> set[int]:
        """The ranks that have work, also such as they hold back or as has not been sent."""
        return {rank for run in self.pending.values() if run.is_work for rank in run.ranks}

    def busy(self, with_heals: bool = True) -> set[int]:
        """The ranks that have been sent work and do not hold it back."""
        runs = [
            pending
            for run, pending in self.pending.items()
            if pending.is_work and pending.is_sent and (with_heals or run < FIRST_HEAL)
        ]
        return {rank for run in runs for rank in run.ranks} - self.held.keys()

    def idle(self) -> set[int]:
        """The living ranks that have no work and hold back nothing."""
        idle = self.living() - self.held.keys()
        for pending in self.pending.values():
            if not idle:  # soon so, where many runs wait
                break
            if pending.is_work:
                idle -= pending.ranks
        return idle

    def runs_first(self, run: int) -> set[int]:
        """The ranks that run this: they have nothing older to do, and hold nothing back."""
        left = self.pending[run].ranks - self.held.keys()
        for number, pending in self.pending.items():
            if not left:  # soon so, where many runs wait
                break
            if number < run and pending.is_work:
                left -= pending.ranks
        return left

    def in_failed_run(self, ranks: set[int]) -> bool:
        """Whether some of these ranks have had a part in a run that has failed and not ended."""
        runs = [run for run in self.pending.values() if run.has_failed and run.is_work]
        return any(ranks & set(run.members) for run in runs)

    def in_failed_runs(self, ranks: set[int]) -> bool:
        """Whether each of these ranks is in a run that has failed, and is or will be told to leave
        it.
        """
        failed = [
            run for run in self.pending.values() if run.has_failed and run.is_work and run.is_sent
        ]
        return ranks <= {rank for run in failed if run.is_called_off for rank in run.ranks}

    def running(self, ranks: Iterable[int]) -> dict[int, str]:
        """rank -> what it has been sent first and not ended; "" where that is not known."""
        titles = dict.fromkeys(ranks, "")
        for _, pending in sorted(self.pending.items(), reverse=True):
            if pending.is_work and pending.is_sent:
                titles.update((rank, pending.title) for rank in pending.ranks if rank in titles)
        return titles

    def may_go_on(self, rank: int) -> bool:
        """Whether a rank that holds back work may be told to go on: the failed run is over
        everywhere.
        """
        if any(
            run >= FIRST_HEAL and rank in pending.ranks for run, pending in self.pending.items()
        ):
            return False  # it has not come out of a heal
        run = self.held.get(rank, -1)
        return run >= FIRST_HEAL or run not in self.pending

    def let_go(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of some ranks that hold back work and may go on; they hold it back no longer."""
        freed = tuple(rank for rank in sorted(ranks) if rank in self.held and self.may_go_on(rank))
        for rank in freed:
            del self.held[rank]
        return freed

    def begin(self, ready: MeshReady) -> None:
        """The mesh is ready: all ranks are new, or not known yet."""
        self.state, self.ranks, self.store_port = "ready", ready.ranks, ready.store_port
        self.held, self.asking, self.news = {}, {}, News()
        self.dead = {
            info.rank: Died(info.rank, info.ending or "is being replaced", info.last_output)
            for info in ready.ranks
            if info.phase in ("dead", "starting")
        }
        self.news.add(ready.ranks)
