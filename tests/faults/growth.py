"""What the processes of a mesh have while something is repeated, and whether that grows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import processes_of

ROLES = ("controller", "agent", "zygote", "store", "rank")


@dataclass(frozen=True)
class Sample:
    """What a process has; of ranks, what the one has that has most."""

    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass
class Growth:
    """Samples of all processes, by role, in the order of time."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def sample(self, directory: Path) -> None:
        """Write down what this process and those of meshes under a directory have."""
        by_role = collections.defaultdict(list)
        by_role["controller"].append(_sample(psutil.Process()))
        for process in processes_of(directory):
            with contextlib.suppress(psutil.Error):
                role = process.name().removeprefix("cellmesh-")
                by_role[role if role in ROLES else "rank"].append(_sample(process))
        for role, samples in by_role.items():
            self.samples[role].append(_of_each(max, samples))

    def check(
        self,
        memory_share: float = 0.05,
        memory_bytes: int = 8 << 20,
        num_rank_fds: int = 4,
        num_zygote_fds: int = 0,
    ) -> None:
        """Fail if a process has more in the last quarter than in the second, but for some memory
        (the larger of a share and a number of bytes), and for descriptors of a rank: a group may be
        there at one time and not at the other. So may the copy of the zygote that imports modules.
        """
        for role, (early, late) in self._early_and_late():
            bound = early.rss_bytes + max(memory_bytes, memory_share * early.rss_bytes)
            assert late.rss_bytes <= bound, f"memory of the {role} grew from {early} to {late}"
            # The agent, the store and the controller may have a connection more at one time than at
            # another.
            slack = {"zygote": num_zygote_fds, "rank": num_rank_fds}.get(role, 4)
            assert late.num_fds <= early.num_fds + slack, (
                f"descriptors of the {role}: {early} to {late}"
            )
            assert late.num_threads <= early.num_threads + slack, (
                f"threads of the {role}: {early} to {late}"
            )

    def table(self) -> str:
        """What processes had early and late, as Markdown."""
        lines = [
            "| process | memory, second -> last quarter | descriptors | threads |",
            "|---|---|---|---|",
        ]
        for role, (early, late) in self._early_and_late():
            lines.append(
                f"| {role} | {early.rss_bytes / 1e6:.1f} -> {late.rss_bytes / 1e6:.1f} MB "
                f"| {early.num_fds} -> {late.num_fds} | {early.num_threads} -> {late.num_threads} |"
            )
        return "\n".join(lines) + "\n"

    def _early_and_late(self) -> Iterator[tuple[str, tuple[Sample, Sample]]]:
        """The medians of the second and of the last quarter, by role."""
        for role, samples in self.samples.items():
            if samples:
                quarter = max(1, len(samples) // 4)
                early = samples[quarter : 2 * quarter] or samples[:1]
                late = samples[-quarter:]
                yield role, (_of_each(statistics.median, early), _of_each(statistics.median, late))


def _sample(process: psutil.Process) -> Sample:
    with process.oneshot():
        return Sample(process.memory_info().rss, process.num_fds(), process.num_threads())


def _of_each(choose: Callable[[Sequence[int]], float], samples: Sequence[Sample]) -> Sample:
    numbers = zip(*map(dataclasses.astuple, samples), strict=True)
    return Sample(*(int(choose(each)) for each in numbers))
