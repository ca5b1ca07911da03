"""The soak: random cells and random faults from a seed, and a model of what must be there after
each.

::

    python -m tests.faults.soak --seed 1 --minutes 30

A step that fails is named with the seed and its number; ``--steps`` ends after so many.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cellmesh as cm

from .cells import replaces_victim, run_cell
from .growth import Growth
from .models import NUM_RANKS
from .rig import REAPER, Losses, Rig, measure_losses, open_rig
from .rows import DOINGS, FAULTS, outcome_of
from .striking import STRIKES
from .table import describe_machine, write_into
from .watching import Shown, deadline, wait_until

NAMES = tuple(f"value_{number}" for number in range(8))
STEP_S = 120.0


@dataclass
class Soak:
    """One soak."""

    rig: Rig
    random: random.Random  # where all choices come from
    # rank -> what it must hold by name
    names: dict[int, dict[str, int]] = field(
        default_factory=lambda: {r: {} for r in range(NUM_RANKS)}
    )
    growth: Growth = field(default_factory=Growth)
    counts: collections.Counter[str] = field(
        default_factory=collections.Counter
    )  # of what was done
    doing: str = ""  # now, so that a failure names it
    # How many times as long as on a machine without other work a report of a fault may take.
    patience: float = 1.0
    took_s: float = 0.0

    # ---- steps

    def step(self) -> str:
        """Do something at random, check everything, and say what it was."""
        actions: dict[Callable[[], str], int] = {
            self.strike: 12,
            self.bind_names: 4,
            self.push_names: 2,
            self.kill_two: 1,
            self.go_and_come: 1,
            self.rewind: 1,
        }
        action = self.random.choices(list(actions), list(actions.values()))[0]
        self.counts[action.__name__] += 1
        what = action()
        self.check()
        return what

    def strike(self) -> str:
        """A fault, as in the table."""
        possible = [fault for fault in FAULTS if fault.outcome != "ended"]
        # Those that take long by nature come less often.
        weights = [1 if fault.within_s > 5 else 4 for fault in possible]
        fault = self.random.choices(possible, weights)[0]
        doing = self.random.choice(DOINGS)
        victim = self.random.randrange(NUM_RANKS)
        source = self.random.choice([rank for rank in range(NUM_RANKS) if rank != victim])
        self.doing = f"{fault.name} of rank {victim} x {doing.name}, source {source}"
        patient = dataclasses.replace(fault, within_s=self.patience * fault.within_s)
        run_cell(self.rig, patient, doing, victim, source)
        self.counts[f"outcome: {outcome_of(fault, doing)}"] += 1
        if replaces_victim(fault, doing):
            self.names[victim] = dict(self.names[source])
        return fault.name

    def bind_names(self) -> str:
        """A cell on some ranks."""
        ranks = sorted(self.random.sample(range(NUM_RANKS), self.random.randint(1, NUM_RANKS)))
        name, value = self.random.choice(NAMES), self.random.randrange(1 << 30)
        self.doing = f"{name} on ranks {ranks}"
        self.rig.run(f"{name} = {value} + rank", ranks)
        for rank in ranks:
            self.names[rank][name] = value + rank
        return "names bound"

    def push_names(self) -> str:
        """A value from the controller to all ranks."""
        name, value = self.random.choice(NAMES), self.random.randrange(1 << 30)
        self.doing = f"push of {name}"
        self.rig.mesh.push(**{name: value})
        for held in self.names.values():
            held[name] = value
        return "names pushed"

    def kill_two(self) -> str:
        """Two ranks die at once, while all are in a collective or idle."""
        dead = sorted(self.random.sample(range(NUM_RANKS), 2))
        source = self.random.choice([rank for rank in range(NUM_RANKS) if rank not in dead])
        self.doing = f"SIGKILL of ranks {dead}, source {source}"
        for rank in dead:
            STRIKES["SIGKILL"](self.rig, rank)
        mesh = self.rig.mesh
        wait_until(
            lambda: all(mesh.report()[rank].phase == "dead" for rank in dead),
            5 * self.patience,
            "two deaths",
        )
        self.rig.renew(dead, source)
        for rank in dead:
            self.names[rank] = dict(self.names[source])
        return "two killed"

    def go_and_come(self) -> str:
        """Leave the mesh, and attach again."""
        self.doing = "detach, attach"
        name, before = self.rig.mesh.name, num_reapers()
        self.rig.mesh.detach()
        self.rig.mesh = cm.attach(name, sink=Shown())
        # The agent's parent is this process's child: a thread waits for its end. So may those of
        # meshes that other tests have left a moment ago.
        assert num_reapers() <= max(1, before)
        return "attached again"

    def rewind(self) -> str:
        """Load the checkpoint."""
        self.doing = "rewind"
        self.rig.rewind()
        return "rewound"

    # ---- checks

    def check(self) -> None:
        """The mesh holds what the model holds, and the models go on as if nothing had been."""
        self.rig.verify()
        self.rig.check_leftovers()
        found = self.rig.mesh.pull(f"{{n: globals()[n] for n in {NAMES!r} if n in globals()}}")
        for rank, names in self.names.items():
            assert found[rank] == names, f"rank {rank} holds {found[rank]} and not {names}"

    def summary(self) -> str:
        """What it came to, as Markdown: what was done, and what processes had early and late."""
        counts = sorted(self.counts.items())
        done = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts)
        return f"{done}.\n\n{self.growth.table()}"


@contextlib.contextmanager
def open_soak(seed: int, losses: Losses, patience: float) -> Iterator[Soak]:
    """A mesh for a soak; nothing of it is left in the end."""
    with open_rig(losses, lease_s=300) as rig:
        yield Soak(rig, random.Random(seed), patience=patience)


def num_reapers() -> int:
    """Return the number of this process's threads that wait for the end of agents' parents."""
    return sum(thread.name == REAPER for thread in threading.enumerate())


def run_soak(
    seed: int,
    minutes: float,
    losses: Losses,
    num_steps: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
    sample_every_s: float = 10.0,
    patience: float = 1.0,
) -> Soak:
    """Soak for so long, or for so many steps if that is sooner, and `tell` each; returns the soak,
    whose growth has not been judged. Errors name the seed and the step.
    """
    with open_soak(seed, losses, patience) as soak:
        started_at = time.monotonic()
        ends_at = started_at + 60 * minutes
        sampled_at = 0.0
        step = 0
        while time.monotonic() < ends_at and (num_steps is None or step < num_steps):
            step += 1
            soak.doing = "?"
            began = time.monotonic()
            try:
                with deadline(soak.rig.directory, STEP_S, "a step", soak.rig.mesh):
                    soak.step()
            except BaseException as error:
                error.add_note(f"seed {seed}, step {step}: {soak.doing}")
                raise
            tell(f"step {step}: {soak.doing} ({time.monotonic() - began:.1f} s)")
            if time.monotonic() - sampled_at >= sample_every_s:
                soak.growth.sample(soak.rig.directory)
                sampled_at = time.monotonic()
        soak.counts["steps"] = step
        soak.took_s = time.monotonic() - started_at
    return soak


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="A soak.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--output", type=Path, help="write the figures here (between their marks)")
    given = parser.parse_args(arguments)
    # A shell that starts this in the background has it ignore the stop button.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    soak = run_soak(
        given.seed,
        given.minutes,
        measure_losses(),
        given.steps,
        lambda line: print(line, flush=True),
    )
    text = (
        f"{describe_machine()}: seed {given.seed}, {soak.took_s / 60:.0f} minutes, "
        f"{soak.counts['steps']} steps, no state lost.\n\n{soak.summary()}"
    )
    print(text)
    soak.growth.check()
    print("nothing has grown")
    if given.output:
        write_into(given.output, "soak", text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
