"""The state of a mesh as the core knows it: which ranks are alive, which runs they have not ended,
and which ranks hold back new runs until a failed run has ended on all ranks.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import msgspec

from ...wire.codec import Parcel
from ...wire.messages import Died, MeshReady, Relay
from ...wire.peer_calls import PEER_RUNS
from ...wire.ranks import describe_ranks, group_ranks
from ...wire.status import RankInfo, RankState
from .effects import Effect, Note, State, tell_empty
from .transitions import NUM_KEPT, RunPhase, Transition, TransitionLog, add_transition

# Numbers of the core's own runs (heals) begin here.
FIRST_HEAL = 1 << 40


def order_of(run: int) -> int:
    """Return a number by which runs are sorted as a rank executes them: calls of other ranks are
    known once they execute, and so precede the notebook's that wait.
    """
    return run - FIRST_HEAL if run in PEER_RUNS else run


class Pending(msgspec.Struct):
    """The state of a run that has not ended on all its ranks.

    Attributes:
        members: all ranks of the run.
        ranks: the ranks that have not ended it.
        started_at: when it was sent, in seconds.
        is_work: whether main threads execute it, and later work after it; else control threads
            answer it, or it `interleaves`.
        interleaves: whether it may wait beside work of its ranks.
        is_sent: whether it was sent; else it waits for the end of a recovery.
        has_failed: whether a rank has raised in it or died.
        failing: ranks on which it has raised, and that are describing the exception.
        first_end_at: when the first rank ended it.
        settle_at: when the remaining ranks are released.
        released: ranks that have been released.
        interrupted_at: when the user interrupted it.
        kill_at: when ranks that have not stopped are killed, after a second interrupt.
        phase: phase of the run since it was sent.
        watched_at: when its user was last shown where its ranks are.
        judged_at: when its ranks were last examined for a deadlock.
        was_in_step: whether an optimizer's step was interrupted.
        is_waited_for: whether the user waits for it and submits nothing else before it ends.
        met: ranks that have ended it, and have begun collectives in it.
        fills: whether it may put objects into the user's namespace on its ranks.
        title: name of the run in texts for users.
    """

    members: tuple[int, ...]
    ranks: set[int]
    started_at: float
    watched_at: float
    judged_at: float
    is_work: bool = True
    interleaves: bool = False
    is_sent: bool = True
    has_failed: bool = False
    failing: set[int] = msgspec.field(default_factory=set)
    first_end_at: float | None = None
    settle_at: float | None = None
    released: set[int] = msgspec.field(default_factory=set)
    interrupted_at: float | None = None
    kill_at: float | None = None
    phase: RunPhase = "running"
    was_in_step: bool = False
    is_waited_for: bool = False
    met: set[int] = msgspec.field(default_factory=set)
    fills: bool = False
    title: str = ""

    def begin(self, now: float) -> None:
        """Record that a run that was held back is sent now, and count its times from now."""
        waited_s = now - self.started_at
        self.is_sent, self.started_at, self.watched_at, self.judged_at = True, now, now, now
        if self.first_end_at is not None:
            self.first_end_at += waited_s
        if self.settle_at is not None:
            self.settle_at += waited_s


class Returned(msgspec.Struct, frozen=True):
    """Message of the connections to many hosts: a host that counted as lost is connected again, and
    these ranks on it have kept their state.
    """

    ranks: tuple[RankInfo, ...]


class HostLost(msgspec.Struct, frozen=True):
    """Message of the connections to many hosts: a host cannot be reached and counts as lost, and so
    do its living ranks.
    """

    host: str
    ranks: tuple[int, ...]
    reason: str

    def describe(self) -> str:
        """Return a text for users: which host and ranks are lost, and how to get them back."""
        return (
            f"{self.host} ({describe_ranks(self.ranks)}) is lost: {self.reason}. The other ranks "
            "keep what they hold; `%dist_heal` takes the host back if it is heard again, else "
            "starts it again, and `%dist_heal --hosts NAME` puts another host in its place"
        )


class MeshState(msgspec.Struct):
    """The state of one mesh, as the core knows it from messages.

    Attributes:
        num_ranks: number of ranks.
        state: phase of the mesh's life.
        dims: dims of the DeviceMesh, name -> size.
        ranks: last report of the agent on each rank's process.
        dead: dead rank -> message that reports its death.
        pending: run -> its state.
        held: rank that holds back work -> the run that failed on it, -1 if that is not known.
        asking: rank -> number of the request by which it waits for the user's input.
        store_port: port of the c10d store; 0 if it has not changed since the ranks were forked.
        store_address: host of the c10d store; "" if it has not changed.
        num_resizes: how often the mesh has been resized.
        layout: number of ranks of each host.
        apart: the last run whose ranks were stopped at different points; -1 for none.
        deferred: runs that wait for the end of a recovery, in order -> their messages.
        to_replace: ranks that the next recovery replaces, whether or not the user asks for it.
        supervised: dead ranks that get objects of their own once they are replaced (actors).
        asked: ranks that are replaced only because the user's ``heal`` names them.
        news: replaced ranks, with empty namespaces, that no output has mentioned to the user yet
            -> how their predecessors ended.
        failed: rank -> name of the last of its runs that has failed there, if no work that `fills`
            has succeeded since.
        failed_calls: calls of other ranks that have failed on a rank lately (`peer_calls`).
        transitions: latest transitions of the recovery, and of runs that do not simply end.
    """

    num_ranks: int
    state: State = "connecting"
    dims: Mapping[str, int] = msgspec.field(default_factory=dict)
    ranks: tuple[RankInfo, ...] = ()
    dead: dict[int, Died] = msgspec.field(default_factory=dict)
    pending: dict[int, Pending] = msgspec.field(default_factory=dict)
    held: dict[int, int] = msgspec.field(default_factory=dict)
    asking: dict[int, int] = msgspec.field(default_factory=dict)
    store_port: int = 0
    store_address: str = ""
    num_resizes: int = 0
    layout: tuple[int, ...] = ()
    apart: int = -1
    deferred: dict[int, Parcel[Relay]] = msgspec.field(default_factory=dict)
    to_replace: set[int] = msgspec.field(default_factory=set)
    supervised: set[int] = msgspec.field(default_factory=set)
    asked: set[int] = msgspec.field(default_factory=set)
    news: dict[int, str] = msgspec.field(default_factory=dict)
    failed: dict[int, str] = msgspec.field(default_factory=dict)
    failed_calls: collections.deque[int] = msgspec.field(
        default_factory=lambda: collections.deque(maxlen=NUM_KEPT)
    )
    transitions: TransitionLog = msgspec.field(
        default_factory=lambda: collections.deque(maxlen=NUM_KEPT)
    )

    def resize(self, layout: tuple[int, ...], dims: Mapping[str, int]) -> None:
        """Change the number of ranks; new ranks count as dead until they are forked.

        Args:
            layout: number of ranks of each host.
            dims: dims of the DeviceMesh, name -> size.
        """
        before, self.num_ranks = self.num_ranks, sum(layout)
        self.num_resizes, self.layout, self.dims = self.num_resizes + 1, layout, dict(dims)
        new = range(before, self.num_ranks)
        infos = [RankInfo(rank, 0, "", "dead") for rank in new]
        self.ranks = (*self.ranks[: self.num_ranks], *infos)
        gone = range(self.num_ranks, before)
        for rank in gone:
            self.held.pop(rank, None)
            self.asking.pop(rank, None)
            self.dead.pop(rank, None)
        self.forget_news(gone)
        self.dead.update((rank, Died(rank, "has not been started yet", "")) for rank in new)

    def living(self) -> set[int]:
        """Return the ranks that have a process."""
        return {rank for rank in range(self.num_ranks) if rank not in self.dead}

    def among_living(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the given ranks without those that are dead."""
        return tuple(rank for rank in ranks if rank not in self.dead)

    def with_work(self) -> set[int]:
        """Return the ranks that have work: they execute it, have it queued, or will be sent it."""
        return {rank for run in self.pending.values() if run.is_work for rank in run.ranks}

    def serving(self) -> set[int]:
        """Return the ranks that are known to execute calls of other ranks."""
        return {r for run, call in self.pending.items() if run in PEER_RUNS for r in call.ranks}

    def waiting_beyond(self, num_ranks: int) -> str:
        """Return, in words, the calls that wait beside work on ranks from `num_ranks` on; "" if
        there are none.
        """
        beyond = {
            run: sorted(rank for rank in pending.ranks if rank >= num_ranks)
            for run, pending in self.pending.items()
            if pending.interleaves
        }
        return ", ".join(
            f"{self.pending[run].title} on {describe_ranks(ranks)}"
            for run, ranks in beyond.items()
            if ranks
        )

    def busy(self, with_heals: bool = True) -> set[int]:
        """Return the ranks that have been sent work and do not hold it back after a failed run."""
        busy: set[int] = set()
        for run, pending in self.pending.items():
            if pending.is_work and pending.is_sent and (with_heals or run < FIRST_HEAL):
                busy |= pending.ranks
        return busy - self.held.keys()

    def idle(self) -> set[int]:
        """Return the living ranks that have no work and hold back none."""
        idle = self.living() - self.held.keys()
        for pending in self.pending.values():
            if not idle:  # true early if many runs wait
                break
            if pending.is_work:
                idle -= pending.ranks
        return idle

    def is_idle(self, state: RankState) -> bool:
        """Return whether a rank executes nothing, or a call of another rank that has just begun:
        such calls may follow each other without a gap, and work of the core waits for one at most.
        """
        is_new = state.run in PEER_RUNS and state.run not in self.pending
        return state.run < 0 or (is_new and not state.collective)

    def find_quiet(self, states: Mapping[int, RankState], resumable: set[int]) -> set[int]:
        """Return the living ranks that execute nothing and have no work.

        Args:
            states: states of the ranks that answered; one that executes a run holds nothing back.
            resumable: the ranks that hold back work and may go on.
        """
        idle = {rank for rank, state in states.items() if self.is_idle(state)} & self.living()
        unsure = {rank for rank, run in self.held.items() if run < 0}
        for rank in unsure & (states.keys() - idle):
            del self.held[rank]
        sent = (run.ranks for run in self.pending.values() if run.is_work and run.is_sent)
        unsure &= set[int]().union(*sent)  # about to begin, or holding back
        return idle - self.busy() - unsure - (self.held.keys() - resumable)

    def find_absent(self, pending: Pending, with_work: set[int]) -> set[int]:
        """Return the ranks that have nothing to execute, and so cannot join the collectives of a
        run.

        A rank that has ended the run may join from another run, unless it holds that one back until
        this one has ended.
        """
        may_come = pending.ranks | (with_work - self.held.keys())
        if not pending.is_waited_for:
            return set(pending.members) - may_come
        others = set(range(self.num_ranks)) - set(pending.members)
        return (set(pending.members) - may_come) | (others - with_work)

    def forget_asking(self, requests: Mapping[int, int]) -> list[int]:
        """Forget requests (rank -> number) for the user's input that are answered or withdrawn;
        return the ranks that waited for these inputs.
        """
        asking = [rank for rank, request in requests.items() if self.asking.get(rank) == request]
        for rank in asking:
            del self.asking[rank]
        return asking

    def runs_first(self, run: int) -> set[int]:
        """Return the ranks that execute this run now, as they have ended all older runs and hold
        back no work.
        """
        left, order = self.pending[run].ranks - self.held.keys(), order_of(run)
        for number, pending in self.pending.items():
            if not left:  # true early if many runs wait
                break
            if order_of(number) < order and pending.is_work:
                left -= pending.ranks
        return left

    def in_failed_run(self, ranks: set[int]) -> bool:
        """Return whether some of these ranks took part in a run that has failed and not ended."""
        runs = [run for run in self.pending.values() if run.has_failed and run.is_work]
        return any(ranks & set(run.members) for run in runs)

    def in_failed_runs(self, ranks: set[int]) -> bool:
        """Return whether each of these ranks is in a run that has failed, and so will leave it, or
        in a call of another rank, during which nobody else would know that it is busy.
        """
        return ranks <= self.serving() | {
            rank
            for run in self.pending.values()
            if run.has_failed and run.is_work and run.is_sent
            for rank in run.ranks
        }

    def running(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return, for each rank, the title of the oldest run it has not ended, of one that waits
        beside work only if there is no other; "" if unknown.
        """
        titles = dict.fromkeys(ranks, "")
        runs = sorted(self.pending.items(), key=lambda one: (one[1].is_work, -order_of(one[0])))
        for _, pending in runs:
            if (pending.is_work or pending.interleaves) and pending.is_sent:
                titles.update((rank, pending.title) for rank in pending.ranks if rank in titles)
        return titles

    def may_go_on(self, rank: int) -> bool:
        """Return whether a rank that holds back its queued runs may execute them: the run that
        failed has ended on all of its ranks.
        """
        if any(run >= FIRST_HEAL and rank in one.ranks for run, one in self.pending.items()):
            return False  # it has not ended a heal
        run = self.held.get(rank, -1)
        return run >= FIRST_HEAL or run not in self.pending

    def let_go(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Let ranks that hold back queued runs execute them, as far as they `may_go_on`; return
        these ranks.
        """
        freed = tuple(rank for rank in sorted(ranks) if rank in self.held and self.may_go_on(rank))
        for rank in freed:
            del self.held[rank]
        return freed

    def note(self, run: int, pending: Pending, before: RunPhase, event: str, at: float) -> None:
        """Log a run's transition from an earlier phase to its present one."""
        subject = f"run {run} ({pending.title})" if pending.title else f"run {run}"
        after = pending.phase if pending.is_sent else "waiting"
        then = after if pending.ranks else "ended"
        add_transition(self.transitions, Transition(at, subject, before, event, then))

    def revive(self, infos: Iterable[RankInfo]) -> set[int]:
        """Record new processes of dead ranks; return these ranks."""
        new = {info.rank: info for info in infos}
        self.ranks = tuple(new.get(info.rank, info) for info in self.ranks)
        for rank in new:
            self.dead.pop(rank, None)
        return set(new)

    def begin(self, ready: MeshReady) -> None:
        """Reset the state for a mesh that is ready with ranks that are new to this controller."""
        self.state, self.ranks, self.store_port = "ready", ready.ranks, ready.store_port
        self.held, self.asking, self.news = {}, {}, {}
        self.dead = {
            info.rank: Died(info.rank, info.ending or "is being replaced", info.last_output)
            for info in ready.ranks
            if info.phase in ("dead", "starting")
        }
        self.add_news(ready.ranks)

    def missing(self) -> set[int]:
        """Return the dead ranks that are to be replaced; runs on them wait for that."""
        return (self.to_replace | self.asked) & self.dead.keys()

    def spare(self, ranks: Iterable[int]) -> None:
        """Remove ranks from those that a recovery is to replace, as they are new or cannot be
        replaced.
        """
        self.to_replace.difference_update(ranks)
        self.asked.difference_update(ranks)

    def add_news(self, infos: Iterable[RankInfo]) -> None:
        """Add ranks that replaced dead ones to `news`, so that the user is informed that they are
        empty.
        """
        self.news |= {one.rank: one.predecessor_ending for one in infos if one.predecessor_ending}

    def forget_news(self, ranks: Iterable[int]) -> None:
        """Drop ranks from `news` and `failed`: work that `fills` has succeeded there, or they have
        died.
        """
        for rank in ranks:
            self.news.pop(rank, None)
            self.failed.pop(rank, None)

    def describe_failed(self, ranks: set[int]) -> str:
        """Return, for the end of a sentence, the runs of `failed` on these ranks."""
        runs = group_ranks({r: self.failed[r] for r in sorted(self.failed.keys() & ranks)})
        return "".join(f" ({run} has failed on {describe_ranks(on)})" for run, on in runs.items())

    def tell_news(self, run: int, ranks: Iterable[int]) -> list[Effect]:
        """Return a note that some of these ranks replaced dead ones and are empty, for the
        beginning of a run's output, and drop them from `news`.
        """
        endings = {rank: self.news.pop(rank) for rank in sorted(self.news.keys() & set(ranks))}
        if not endings:
            return []
        alike = group_ranks(endings)
        text = "; ".join(f"{describe_ranks(ranks)} {ending}" for ending, ranks in alike.items())
        return [Note(run, f"{text}; {tell_empty(endings, self.num_ranks)}")]
