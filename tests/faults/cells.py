"""One cell of the table, on a mesh that is shared by many: a fault strikes, then everything is
there.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from tests.conftest import check_nothing_left

from .rig import NUM_RANKS, Rig
from .rows import Doing, Fault, cell_for, holder_for, outcome_of
from .serving import Serving
from .striking import STRIKES
from .watching import Shown, Stuck, deadline, diagnose, runs_in, wait_until

ARRIVAL_S = 40.0
CELL_S = 200.0
# After the death of what a new rank needs, a rank is killed and replaced.
NEEDED = ("zygote SIGKILL", "store SIGKILL")
# Between two presses of the stop button.
PRESS_AGAIN_S = 0.3


@dataclass(frozen=True)
class Result:
    """What came of one cell of the table."""

    fault: str  # the row's name
    doing: str  # the column's name
    outcome: str  # see `rows.Fault`
    report_s: float = 0.0  # from the strike until its report: the death told, the run over
    back_s: float = 0.0  # from there until steps of all models had given the right losses
    heal_s: float = 0.0  # of a heal that forked a rank and copied nothing
    failure: str = ""  # what was wrong


def run_cell(
    rig: Rig,
    fault: Fault,
    doing: Doing,
    victim: int = 1,
    source: int = 0,
    is_serving: bool = False,
) -> Result:
    """Let a fault strike the victim, for which `source` is copied if it dies, and check all; with
    `is_serving` while calls wait on every rank.
    """
    what = f"{fault.name} x {doing.name}"
    outcome = outcome_of(fault, doing)
    with deadline(rig.directory, CELL_S, what, rig.mesh):
        serving = Serving(rig) if is_serving else None
        trial = _Trial(rig, fault, doing, rig.new_gate(), victim)
        report_s = trial.strike_idle() if not doing.place else trial.strike()
        reported_at, heal_s = time.monotonic(), 0.0
        if outcome == "ended":
            return Result(fault.name, doing.name, outcome, report_s)
        dead = victim if outcome in ("died", "killed") else None
        if serving is not None:
            serving.check(dead, fault.within_s)
        if outcome in ("died", "killed"):
            # `os._exit` stands for those who heal first and copy later.
            at_once = fault.name != "os._exit"
            report = rig.renew([victim], source, at_once)
            heal_s = 0.0 if at_once else report.took_s
        trial.clean_up()
        rig.verify()
        back_s = time.monotonic() - reported_at
        if serving is not None:
            serving.end(dead)
        if fault.name in NEEDED:
            _check_forks(rig, victim, source)
        rig.check_leftovers()
    return Result(fault.name, doing.name, outcome, report_s, back_s, heal_s)


def _check_forks(rig: Rig, victim: int, source: int) -> None:
    """A rank that dies can be replaced: zygote and store are there again."""
    STRIKES["SIGKILL"](rig, victim)
    wait_until(lambda: rig.mesh.report()[victim].phase == "dead", 5, "the death of an idle rank")
    rig.renew([victim], source)
    rig.verify()


def replaces_victim(fault: Fault, doing: Doing) -> bool:
    """Whether the victim is another process afterwards, with what it was given from its source."""
    return outcome_of(fault, doing) in ("died", "killed") or fault.name in NEEDED


class _Trial:
    """One strike of one fault."""

    def __init__(self, rig: Rig, fault: Fault, doing: Doing, gate: Path, victim: int) -> None:
        self.rig, self.fault, self.doing, self.gate, self.victim = rig, fault, doing, gate, victim
        self.outcome = outcome_of(fault, doing)
        self.shown = Shown()
        self.is_own = fault.striker == "victim"
        self.holding = victim if self.is_own else holder_for(victim)
        pair = {victim, holder_for(victim)}
        self.concerned = set(range(NUM_RANKS)) if doing.concerns_all else pair
        self.run = rig.mesh.submit_cell(cell_for(fault, doing, str(gate), victim), sink=self.shown)
        for kept in rig.kept.values():
            kept.counter += 1
        self.struck_at = 0.0  # by time.time()

    # ---- striking

    def strike_idle(self) -> float:
        """No run is there: what the fault does shows in the mesh's report, or nowhere."""
        self.run.result(timeout_s=ARRIVAL_S)
        self.struck_at = time.time()
        if self.is_own:
            self.gate.touch()
        elif self.fault.striker == "user":
            self.rig.mesh.interrupt()
        else:
            STRIKES[self.fault.name](self.rig, self.victim)
            if self.outcome == "unharmed":
                self.struck_at = time.time()
        mesh = self.rig.mesh
        if self.outcome == "died":
            wait_until(
                lambda: mesh.report()[self.victim].phase == "dead",
                self.fault.within_s,
                "the death of an idle rank",
            )
            report_s = time.time() - self.struck_at
            self._check_dead_is_told()
            return report_s
        if self.outcome == "ended":
            wait_until(lambda: not mesh.alive, self.fault.within_s, "the end of the mesh")
            return self._check_end()
        if self.is_own and self.fault.error and self.fault.error != "SystemExit":
            self.shown.wait_for(self.fault.error, self.fault.within_s)
        elif self.fault.name == "exception in a thread":
            self.shown.wait_for("boom in a thread", self.fault.within_s)
        return time.time() - self.struck_at

    def strike(self) -> float:
        """Strike while all ranks are in the run; gives how long the report took."""
        queued = None
        in_background = self.doing.name == "background run"
        if in_background:
            queued = self.rig.mesh.submit_cell("queued = kept['counter']", sink=Shown())
        if self.fault.striker == "user" or self.outcome in ("stopped", "killed"):
            error = self._stop_in_background() if in_background else self._press_stop()
        else:
            self._wait_until_in_place()
            if self.is_own:
                self.struck_at = (
                    self.gate.with_name(f"{self.gate.name}.{self.victim}").stat().st_mtime
                )
            else:
                self.struck_at = time.time()
                STRIKES[self.fault.name](self.rig, self.victim)
            if self.outcome == "unharmed":
                self.struck_at = time.time()  # it may have taken its time
                if self.fault.name == "exception in a thread":
                    self.shown.wait_for("boom in a thread", self.fault.within_s)
                self.gate.touch()
            if self.outcome == "died":
                self._wait_for_death()
            error = self._result()
        report_s = self._check(error)
        if queued is not None:
            self._check_queued(queued)
        return report_s

    def _wait_until_in_place(self) -> None:
        """Until all ranks are where the fault is to strike, as they say and as is seen."""
        marks = [self.gate.with_name(f"{self.gate.name}.{rank}") for rank in range(NUM_RANKS)]
        wait_until(
            lambda: all(mark.exists() for mark in marks) or self.run.done(),
            ARRIVAL_S,
            "the ranks' arrival",
        )
        # What the victim does by itself strikes when it arrives: there is nothing to wait for.
        waiting = self.concerned - {self.holding}
        if not self.doing.waits_in or (self.is_own and self.outcome != "stopped"):
            return

        def are_blocked() -> bool:
            states = self.rig.mesh.states()
            return all(
                rank in states and re.search(self.doing.waits_in, states[rank].collective)
                for rank in waiting
            )

        wait_until(are_blocked, ARRIVAL_S, f"ranks {sorted(waiting)} wait in {self.doing.waits_in}")

    def _press_stop(self) -> BaseException | None:
        """The stop button, while this thread waits for the run."""
        main = threading.main_thread().ident
        assert main is not None
        assert threading.current_thread() is threading.main_thread()
        failures: list[BaseException] = []

        def press() -> None:
            try:
                self._wait_until_in_place()
                if self.fault.name == "infinite loop":
                    self.shown.wait_for(f"rank {self.victim} running", self.fault.within_s)
                wait_until(
                    lambda: runs_in(main, cm.Run.result.__code__), ARRIVAL_S, "somebody who waits"
                )
                self.struck_at = time.time()
                signal.pthread_kill(main, signal.SIGINT)
                if self.outcome == "killed":
                    threading.Event().wait(PRESS_AGAIN_S)
                    signal.pthread_kill(main, signal.SIGINT)
            except BaseException as e:
                failures.append(e)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            error = self._result(2 * ARRIVAL_S + self.fault.within_s)
        finally:
            presser.join()
        if failures:
            raise failures[0]
        return error

    def _stop_in_background(self) -> BaseException | None:
        """`%dist_interrupt`: nobody waits for the run."""
        self._wait_until_in_place()
        if self.fault.name == "infinite loop":
            self.shown.wait_for(f"rank {self.victim} running", self.fault.within_s)
        self.struck_at = time.time()
        self.rig.mesh.interrupt()
        if self.outcome == "killed":
            threading.Event().wait(PRESS_AGAIN_S)
            self.rig.mesh.interrupt()
        return self._result()

    def _wait_for_death(self) -> None:
        waiting = self.run.waiting_ranks
        wait_until(lambda: self.victim not in waiting(), self.fault.within_s, "the death's report")
        self.death_s = time.time() - self.struck_at

    def _result(self, timeout_s: float | None = None) -> BaseException | None:
        try:
            self.run.result(timeout_s=timeout_s or ARRIVAL_S)
        except (cm.RankFailure, RanksInterrupted) as error:
            return error
        except TimeoutError as error:
            raise Stuck(f"{error}\n{diagnose(self.rig.directory, self.rig.mesh)}") from error
        return None

    # ---- checking

    def _check(self, error: BaseException | None) -> float:
        took_s = time.time() - self.struck_at
        assert took_s <= self.fault.within_s, f"it took {took_s:.1f} s"
        if self.outcome == "unharmed":
            assert error is None, f"nothing was to fail: {error}"
            return took_s
        if self.outcome == "ended":
            assert isinstance(error, cm.RankFailure), error
            assert self.fault.words in str(error), error
            return self._check_end()
        if self.outcome in ("stopped", "killed"):
            assert isinstance(error, RanksInterrupted), f"interrupted, and yet {error!r}"
            if self.outcome == "killed":
                assert re.search(f"rank {self.victim} did not stop .* killed", str(error)), (
                    f"the kill is not told: {error}"
                )
            return took_s
        assert isinstance(error, cm.RankFailure), f"a rank was to fail: {error!r}"
        exceptions = error.exceptions_by_rank
        kinds = [cls.__name__ for cls in type(exceptions[self.victim]).__mro__] + [
            getattr(exceptions[self.victim], "type_name", "")
        ]
        assert self.fault.error in kinds, exceptions
        assert re.search(self.fault.words, str(error)), f"{self.fault.words!r} is not in {error}"
        released = {rank for rank in exceptions if rank != self.victim}
        for rank in released:
            assert isinstance(exceptions[rank], cm.Released), exceptions
        wanted = self.concerned - {self.victim}
        assert released == wanted, f"ranks {sorted(wanted)} were to be released: {error}"
        if self.outcome == "died":
            return self.death_s
        trace_at = self.shown.first_trace_at
        assert trace_at is not None, "no traceback was shown"
        return trace_at - self.struck_at

    def _check_queued(self, queued: cm.Run[Any]) -> None:
        """What waited behind the run has run on ranks that live, unless it was stopped as well."""
        error: BaseException | None = None
        try:
            queued.result(timeout_s=ARRIVAL_S)
        except (cm.RankFailure, RanksInterrupted) as e:
            error = e
        match self.outcome:
            case "unharmed" | "raised":
                assert error is None, f"the queued cell: {error!r}"
                counters = self.rig.mesh.pull("queued").list
                assert counters == [kept.counter for kept in self.rig.kept.values()]
            case "died":
                assert isinstance(error, cm.RankFailure), f"the queued cell: {error!r}"
                assert set(error.exceptions_by_rank) == {self.victim}, error
            case _:
                expected = cm.RankFailure if self.outcome == "ended" else RanksInterrupted
                assert isinstance(error, expected), f"the queued cell: {error!r}"

    def _check_dead_is_told(self) -> None:
        with pytest.raises((cm.RankDied, cm.RankFailure), match=self.fault.words):
            self.rig.mesh.submit(int).result(timeout_s=ARRIVAL_S)

    def _check_end(self) -> float:
        """The mesh has ended by itself; a stop takes the rest away, and then nothing is left."""
        took_s = time.time() - self.struck_at
        self.rig.mesh.stop()
        check_nothing_left(self.rig.directory)
        return took_s

    def clean_up(self) -> None:
        """Let go on what still waits or loops in threads."""
        self.gate.touch()
        self.rig.run("gate = None")
