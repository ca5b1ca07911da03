"""Why a rank's process ended, from the kernel's counters and the rank's last lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellmesh.workers.agent.death_report import (
    OomWatch,
    explain_kill,
    explain_mismatch,
    explain_refusal,
    last_lines,
    parse_address_limit,
    without_own_frames,
)

PID = 77


class Kernel:
    """The files that the kernel would show."""

    def __init__(self, directory: Path, version: int) -> None:
        self.proc, self.root = directory / "proc", directory / "cgroup"
        self.version = version
        (self.proc / str(PID)).mkdir(parents=True)
        self.set_host_kills(3)

    def set_host_kills(self, number: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {number}\n")

    def set_group(self, path: str, kills: int, limit: str) -> None:
        membership = f"5:cpu:/\n4:memory:{path}\n0::/\n" if self.version == 1 else f"0::{path}\n"
        (self.proc / str(PID) / "cgroup").write_text(membership)
        inner = path.lstrip("/")
        directory = self.root / "memory" / inner if self.version == 1 else self.root / inner
        directory.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            (directory / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
            (directory / "memory.limit_in_bytes").write_text(limit)
        else:
            (directory / "memory.events").write_text(f"low 0\noom 9\noom_kill {kills}\n")
            (directory / "memory.max").write_text(limit)

    def watch(self) -> OomWatch:
        return OomWatch(self.root, self.proc)


@pytest.fixture(params=[1, 2])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, request.param)


def test_a_kill_that_the_group_counts_is_one_for_want_of_memory(kernel: Kernel) -> None:
    kernel.set_group("/job/7", 2, "6000")
    watch = kernel.watch()
    for num_kills in (2, 4, 4):  # two ranks may be killed before the first is looked at
        watch.watch(PID)
        kernel.set_group("/job/7", num_kills, "6000")
        assert watch.was_killed(PID) == (num_kills == 4, 6000)


def test_a_group_that_is_forgotten_at_the_end_was_noted_at_the_beginning(kernel: Kernel) -> None:
    kernel.set_group("/", 0, str((1 << 63) - 4096))
    kernel.set_group("/job", 0, "6000")
    watch = kernel.watch()
    watch.watch(PID)
    kernel.set_group("/job", 1, "6000")
    kernel.set_group("/", 0, str((1 << 63) - 4096))
    assert watch.was_killed(PID) == (True, 6000)


def test_host_counter_decides_without_control_groups(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    watch = kernel.watch()
    watch.watch(PID)
    assert watch.was_killed(PID) == (False, None)
    kernel.set_host_kills(4)
    assert watch.was_killed(PID) == (True, None)
    assert watch.was_killed(PID) == (False, None)


def test_the_limit_on_addresses_is_read_where_there_is_one() -> None:
    head = "Limit                     Soft Limit           Hard Limit           Units     \n"
    line = "Max address space         {:<20} unlimited            bytes     \n"
    assert parse_address_limit(head + line.format("4096000000")) == 4096000000
    assert parse_address_limit(head + line.format("unlimited")) is None
    assert parse_address_limit("") is None


def test_oom_report_names_the_size_and_the_remedy() -> None:
    assert explain_kill(5_200_000_000, 6_000_000_000) == (
        ": out of memory (it held 5.2 GB, and its control group may use 6.0 GB; "
        "use smaller batches, fewer ranks or a host with more memory)"
    )
    assert "control group" not in explain_kill(52_000_000, None)
    assert "52 MB" in explain_kill(52_000_000, None)


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  ...",
        "MemoryError",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_refused_allocation_is_recognized_by_the_last_output(words: str) -> None:
    assert "refused more memory" in explain_refusal(words, 10**9, None)
    assert "`ulimit -v`, is 4.0 GB" in explain_refusal(words, 10**9, 4 * 10**9)
    assert explain_refusal("Segmentation fault", 10**9, 4 * 10**9) == ""


def test_an_abort_by_gloo_is_explained() -> None:
    words = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
        "op.nbytes. 2097152 vs 8. Received data size doesn't match expected size."
    )
    assert explain_mismatch(words) == (
        ": gloo ended it, as another rank sent it 2,097,152 bytes where it expected 8: these ranks "
        "have begun operations of different sizes or kinds"
    )
    assert explain_mismatch("terminate called without an active exception") == ""


HEAD = "Thread 0x00007fb29d7106c0 (most recent call first):"
CURRENT = "Current thread 0x00007fb2bee0ab80 (most recent call first):"
OWN = '  File "/site/cellmesh/workers/shell.py", line 287 in _run_plainly'
STDLIB = '  File "/usr/lib/python3.11/threading.py", line 982 in run'
STRING = '  File "<string>", line 1 in <module>'
CELL = '  File "<ipython-input-1-d778896f5460>", line 3 in <module>'
TORCH = '  File "/site/torch/nn/modules/module.py", line 1 in _call_impl'
GROUPS = '  File "/site/cellmesh/workers/groups/groups.py", line 5 in all_reduce'


CRASH, ABORTED = [CURRENT, CELL], ["Fatal Python error: Aborted", ""]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], []),
        (["last words", STDLIB], ["last words", STDLIB]),
        ([*ABORTED, HEAD, OWN, STDLIB, "x"], [*ABORTED, "x"]),
        ([HEAD, STDLIB, STDLIB, OWN], []),
        ([CURRENT, TORCH, CELL, OWN, OWN, STRING], [CURRENT, TORCH, CELL]),
        ([CURRENT, GROUPS, CELL, OWN, STRING], [CURRENT, GROUPS, CELL]),
        ([CURRENT, OWN, STRING, "end"], [CURRENT, OWN, STRING, "end"]),
        ([HEAD, STDLIB, CELL, STDLIB, HEAD, OWN, *CRASH], [HEAD, STDLIB, CELL, *CRASH]),
        (["no head", OWN], ["no head", OWN]),
    ],
    ids=["none", "words", "runtime", "waits", "cell", "between", "crash", "threads", "headless"],
)  # fmt: skip
def test_stacks_without_the_runtimes_frames(lines: list[str], left: list[str]) -> None:
    assert without_own_frames(lines, "/site/cellmesh") == left


def test_last_lines_are_ten_and_of_a_crash_the_first_ten() -> None:
    printed = [f"step {n}" for n in range(12)]
    assert last_lines(printed) == printed[2:]
    crash = ["Fatal Python error: Segmentation fault", CURRENT, *[CELL] * 30]
    assert last_lines([*printed, *crash]) == crash[:10]
    assert last_lines([*printed, *crash[:4]]) == [*printed[6:], *crash[:4]]
