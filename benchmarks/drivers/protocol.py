"""What all drivers do alike: how often, by which stopwatch, and how results leave the process."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from ..processes import MARK, cpu_s, own_tree

Handle = TypeVar("Handle")
Sample = dict[str, float]


@dataclass(frozen=True)
class Counts:
    """How often things are repeated, the same for every contestant."""

    num_warmups: int
    num_calls: int
    num_pipelined: int
    num_transfers: int  # of bulk data


FULL = Counts(num_warmups=50, num_calls=300, num_pipelined=1000, num_transfers=7)
QUICK = Counts(num_warmups=20, num_calls=100, num_pipelined=300, num_transfers=3)
SMALL_ARGUMENT = bytes(1024)
NUM_SENDS = 1000  # without results


def elapsed_s(action: Callable[[], object]) -> float:
    """How long one action took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def time_calls(call: Callable[[], object], counts: Counts) -> list[float]:
    """Durations of a call made again and again, each after the one before has ended; warm-ups left
    out.
    """
    for _ in range(counts.num_warmups):
        call()
    return [elapsed_s(call) for _ in range(counts.num_calls)]


def measure_calls(call: Callable[[], object], counts: Counts) -> Sample:
    """Summarize the durations of `time_calls` as `call`, and give the CPU time of a call, of all
    processes of this driver, as `call_cpu_s`.
    """
    time_calls(call, replace(counts, num_calls=0))
    pids = own_tree()
    before_s = sum(map(cpu_s, pids))
    durations_s = time_calls(call, replace(counts, num_warmups=0))
    used_s = sum(map(cpu_s, pids)) - before_s
    return {**summarize("call", durations_s), "call_cpu_s": used_s / counts.num_calls}


def summarize(name: str, durations_s: Iterable[float]) -> Sample:
    """The median and the 99th percentile (nearest rank) as the measures `<name>_s` and
    `<name>_p99_s`.
    """
    ordered = sorted(durations_s)
    return {
        f"{name}_s": statistics.median(ordered),
        f"{name}_p99_s": ordered[math.ceil(0.99 * len(ordered)) - 1],
    }


def calls_per_s(
    submit: Callable[[], Handle], wait: Callable[[Handle], object], counts: Counts
) -> float:
    """The rate of calls that are all submitted before the first is waited for; warm-ups left
    out.
    """

    def run(num_calls: int) -> None:
        handles = [submit() for _ in range(num_calls)]
        for handle in handles:
            wait(handle)

    run(counts.num_warmups)
    return counts.num_pipelined / elapsed_s(lambda: run(counts.num_pipelined))


def main(measure: Callable[[int, Counts], Sample]) -> None:
    """The command line of a driver: measure, and print the sample as the last line of stdout.

    Args:
        measure: given the number of ranks and the counts, returns the sample and leaves nothing
            running.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("num_ranks", type=int, nargs="?", default=8)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    os.environ.setdefault(MARK, secrets.token_hex(8))  # by hand, nobody has set it
    sample = measure(arguments.num_ranks, QUICK if arguments.quick else FULL)
    print(json.dumps(sample), flush=True)
