"""`python -m benchmarks.run`: measure everything in turn, compare, and write `results.md`.

A round runs every contestant once, each alone in a process of its own; the next round begins with
the next contestant. So what changes on the machine in the course of a run changes it for all.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from . import report
from .contestants import CONTESTANTS, Contestant, Peer
from .drivers.protocol import FULL, QUICK, Sample
from .environments import DEFAULT_FOLDER, ensure_environment
from .figures import Figures
from .machine import describe_machine
from .runner import DriverFailed, run_driver

RESULTS = Path(__file__).parent / "results.md"
_NUM_ROUNDS = 3
_PROFILE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        argv: the command line, without the program.

    Returns:
        0, or 1 if something could not be measured. A target missed is a result, not a failure.
    """
    arguments = _parse(argv)
    contestants = [one for one in CONTESTANTS if not arguments.only or one.name in arguments.only]
    asked_for = [one.name for one in contestants]
    machine = describe_machine()
    began = datetime.now().astimezone()
    samples, notes = measure_all(contestants, arguments.envs, arguments.rounds, arguments.quick)
    figures = Figures(samples)
    profile = _profile(notes) if "cellmesh" in samples else ""

    counts = QUICK if arguments.quick else FULL
    method = (
        f"Medians of {arguments.rounds} round(s); in a round, {counts.num_calls} calls or cells "
        f"after {counts.num_warmups} to warm up, and {counts.num_pipelined} pipelined calls, the "
        "same for all. Contestants run in turn, each alone in a process of its own."
    )
    # Of folders, which are this machine's, the name will do.
    words = (
        Path(word).name if "/" in word else word
        for word in (sys.argv[1:] if argv is None else argv)
    )
    command = shlex.join(["python", "-m", "benchmarks.run", *words])
    text = report.document(
        figures, machine, began.strftime("%Y-%m-%d %H:%M %Z"), command, method, profile, notes
    )
    print("\n" + text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        print(f"written to {arguments.out}")
    complete = all(len(samples.get(name, ())) == arguments.rounds for name in asked_for)
    return 0 if complete else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--quick", action="store_true", help="one round, fewer repetitions")
    parser.add_argument("--rounds", type=int, help=f"default {_NUM_ROUNDS}")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--envs", type=Path, default=DEFAULT_FOLDER, help="where peers' environments are"
    )
    parser.add_argument(
        "--out", type=Path, help="default results.md, of a run neither --quick nor --only"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else _NUM_ROUNDS
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    if arguments.out is None and not (arguments.quick or arguments.only):
        arguments.out = RESULTS
    return arguments


def _environment(contestant: Contestant) -> str:
    return contestant.peer.name if contestant.peer else ""


def _interpreters(
    contestants: Sequence[Contestant], folder: Path
) -> tuple[dict[str, str], list[str]]:
    """The interpreter of each environment by its name, ours without one; and which could not be
    made.
    """
    interpreters, notes = {"": sys.executable}, []
    peers: dict[str, Peer] = {one.peer.name: one.peer for one in contestants if one.peer}
    for name, peer in peers.items():
        try:
            interpreters[name] = str(ensure_environment(peer, folder.absolute()))
        except (subprocess.CalledProcessError, RuntimeError) as error:
            notes.append(f"the environment of {name} could not be made: {error}")
            print(notes[-1], file=sys.stderr)
    return interpreters, notes


def measure_all(
    contestants: Sequence[Contestant],
    folder: Path,
    num_rounds: int,
    quick: bool,
    kept: Path | None = None,
) -> tuple[dict[str, list[Sample]], list[str]]:
    """All rounds of contestants, whose environments are in a folder, with those of earlier runs in
    a file, to which they are added; and what went wrong.
    """
    interpreters, notes = _interpreters(contestants, folder)
    contestants = [one for one in contestants if _environment(one) in interpreters]
    samples: dict[str, list[Sample]] = {}
    if kept is not None and kept.exists():
        samples = json.loads(kept.read_text())
    for number in range(num_rounds):
        first = number % len(contestants) if contestants else 0
        for contestant in [*contestants[first:], *contestants[:first]]:
            began = time.monotonic()
            print(f"round {number + 1}/{num_rounds}: {contestant.title} ... ", end="", flush=True)
            try:
                outcome = run_driver(contestant, interpreters[_environment(contestant)], quick)
            except DriverFailed as error:
                lines = str(error).splitlines()
                notes.append(": ".join(dict.fromkeys((lines[0], lines[-1]))))
                print(f"failed: {error}")
                continue
            samples.setdefault(contestant.name, []).append(outcome.sample)
            if kept is not None:
                kept.write_text(json.dumps(samples))
            print(f"{time.monotonic() - began:.1f} s")
            if outcome.num_left_behind:
                left = f"{outcome.num_left_behind} processes behind in round {number + 1}"
                notes.append(f"{contestant.title} left {left}")
    return samples, notes


def _profile(notes: list[str]) -> str:
    command = [sys.executable, "-m", "benchmarks.cpu_profile"]
    try:
        done = subprocess.run(
            command,
            cwd=RESULTS.parents[1],
            check=True,
            capture_output=True,
            text=True,
            timeout=_PROFILE_S,
        )
    except subprocess.CalledProcessError as error:
        notes.append(f"the profile failed: {error.stderr.strip().splitlines()[-1:]}")
        return ""
    except subprocess.TimeoutExpired:
        notes.append(f"the profile was not there after {_PROFILE_S:.0f} s")
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
