"""`python -m benchmarks.cpu_profile`: where the CPU time of a no-op call goes.

With more ranks than cores, a call takes about as long as the cores need for what all processes
spend on it: that is what there is to save. Linux counts it by the thread
(/proc/<pid>/task/<tid>/schedstat, in ns), so nothing is instrumented and the calls run at their
usual speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .processes import descendants, process_name
from .report import table

if TYPE_CHECKING:
    from cellmesh import Mesh

_NUM_WARMUPS = 200

Where = tuple[str, str]


@dataclass(frozen=True)
class Usage:
    """What threads have used since they began, or in a span.

    Args:
        cpu_ns: on a core.
        delay_ns: ready to run, and waiting for a core.
        num_sleeps: times that they went to sleep; each is a wakeup, too.
        user_ticks, kernel_ticks: sampled; good for the share of the kernel.
    """

    cpu_ns: int = 0
    delay_ns: int = 0
    num_sleeps: int = 0
    user_ticks: int = 0
    kernel_ticks: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """Its fields, in order."""
        return self.cpu_ns, self.delay_ns, self.num_sleeps, self.user_ticks, self.kernel_ticks


def read_usage(pid: int, tid: int) -> Usage:
    """What a thread has used so far; nothing if it is gone."""
    base = f"/proc/{pid}/task/{tid}"
    try:
        with open(f"{base}/schedstat") as file:
            cpu_ns, delay_ns, _ = map(int, file.read().split())
        with open(f"{base}/status") as file:
            sleeps = next(
                int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt")
            )
        with open(f"{base}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Usage()
    return Usage(cpu_ns, delay_ns, sleeps, int(fields[11]), int(fields[12]))


def read_tree() -> Mapping[Where, Usage]:
    """What this process and all below it have used so far, by kind of process and of thread."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    total: dict[Where, Usage] = {}
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            tids = [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
        except FileNotFoundError:
            continue
        for tid in tids:
            where = _kind(pid), names.get(tid) or ("main" if tid == pid else "other threads")
            total[where] = total.get(where, Usage()) + read_usage(pid, tid)
    return total


def _kind(pid: int) -> str:
    if pid == os.getpid():
        return "controller"
    name = process_name(pid).removeprefix("cellmesh-")
    return "ranks, all" if name.startswith("r") and name[1:].isdigit() else name


def profile(title: str, work: Callable[[int], None], num_calls: int) -> str:
    """Run some work and say where its CPU time went.

    Args:
        title: of the work.
        work: does it as many times as it is told.
        num_calls: how many times.

    Returns:
        Markdown.
    """
    work(_NUM_WARMUPS)
    before = read_tree()
    began = time.perf_counter()
    work(num_calls)
    wall_us = (time.perf_counter() - began) / num_calls * 1e6
    after = read_tree()
    used = {where: after[where] - before.get(where, Usage()) for where in after}
    whole = sum(used.values(), Usage())
    lines = [
        ["process", "thread", "CPU us", "share", "in the kernel", "waited for a core us", "wakeups"]
    ]
    for (process, thread), usage in sorted(used.items(), key=lambda item: -item[1].cpu_ns):
        if usage.cpu_ns / num_calls >= 100:
            lines.append(_line(process, thread, usage, whole, num_calls))
    lines.append(_line("all", "", whole, whole, num_calls))
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"{title}, a call on average: {wall_us:.0f} us on the clock, "
        f"{whole.cpu_ns / num_calls / 1e3:.0f} us of CPU on {num_cores} cores.\n\n{table(lines)}\n"
    )


def _line(process: str, thread: str, usage: Usage, whole: Usage, num_calls: int) -> list[str]:
    ticks = usage.user_ticks + usage.kernel_ticks
    return [
        process,
        thread,
        f"{usage.cpu_ns / num_calls / 1e3:.1f}",
        f"{usage.cpu_ns / whole.cpu_ns:.0%}",
        f"{usage.kernel_ticks / ticks:.0%}" if ticks else "-",
        f"{usage.delay_ns / num_calls / 1e3:.1f}",
        f"{usage.num_sleeps / num_calls:.2f}",
    ]


_BEGIN = "import cProfile\n_profiler = cProfile.Profile()\n_profiler.enable()"
_END = """
_profiler.disable()
import io, pstats
_text = io.StringIO()
_stats = pstats.Stats(_profiler, stream=_text).sort_stats("tottime").print_stats(25)
"""


def profile_functions(mesh: Mesh, work: Callable[[int], None], num_calls: int) -> str:
    """The functions that rank 0's main thread spends its time in; the profiler makes calls look
    dearer.
    """
    mesh[0].cell(_BEGIN)
    work(num_calls)
    mesh[0].cell(_END)
    return str(mesh[0].pull("_text.getvalue()"))


def noop() -> None:
    """What every rank is asked to do."""


def works(mesh: Mesh) -> Mapping[str, tuple[str, Callable[[int], None]]]:
    """What can be profiled: name -> title and work."""

    def calls(count: int) -> None:
        for _ in range(count):
            mesh.run(noop)

    def cells(count: int) -> None:
        for _ in range(count):
            mesh.cell("pass")

    def pipelined(count: int) -> None:
        for run in [mesh.submit(noop) for _ in range(count)]:
            run.result()

    size = len(mesh)
    return {
        "call": (f"No-op on {size} ranks", calls),
        "pipelined": (f"No-op on {size} ranks, pipelined", pipelined),
        "cell": (f"Cell `pass` on {size} ranks, from a script", cells),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Profile on a mesh started for it, and print tables."""
    import cellmesh

    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_profile", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--what", action="append", choices=["call", "pipelined", "cell"])
    parser.add_argument("--functions", action="store_true", help="by function, too, on rank 0")
    arguments = parser.parse_args(argv)
    with cellmesh.start(arguments.ranks) as mesh:
        for name, (title, work) in works(mesh).items():
            if name in (arguments.what or ["call", "pipelined"]):
                print(profile(title, work, arguments.calls))
                if arguments.functions:
                    print(profile_functions(mesh, work, arguments.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
