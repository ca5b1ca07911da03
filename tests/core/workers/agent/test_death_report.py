"""Why a rank's process ended, from the kernel's counters and the rank's last lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import cellmesh
from cellmesh.workers.agent.death_report import (
    OomWatch,
    explain_kill,
    explain_mismatch,
    explain_refusal,
    last_lines,
    without_own_frames,
)


def test_kills_that_the_host_counts_are_for_want_of_memory(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 3\n")
    watch = OomWatch(vmstat)
    assert not watch.has_struck(10.0)
    vmstat.write_text("nr_free_pages 5\noom_kill 5\n")
    assert watch.has_struck(20.0)
    assert watch.has_struck(25.0)  # of two ranks, the second
    assert not watch.has_struck(31.0)
    vmstat.unlink()
    assert not OomWatch(vmstat).has_struck(0.0)


def test_oom_report_names_the_size_and_the_remedy() -> None:
    advice = "use smaller batches, fewer ranks or a host with more memory"
    assert explain_kill(5_200_000_000) == f": out of memory (it held 5.2 GB; {advice})"
    assert "52.0 MB" in explain_kill(52_000_000)


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  ...",
        "MemoryError",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_refused_allocation_is_recognized_by_the_last_output(words: str) -> None:
    assert "refused more memory (it held 1.0 GB; raise `ulimit -v`" in explain_refusal(words, 10**9)
    assert explain_refusal("Segmentation fault", 10**9) == ""


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
OWN = f'  File "{Path(cellmesh.__file__).parent}/workers/rank/shell.py", line 287 in _run_plainly'
STDLIB = '  File "/usr/lib/python3.11/threading.py", line 982 in run'
STRING = '  File "<string>", line 1 in <module>'
PRINTED = '  File "/usr/lib/python3.11/threading.py", line 982, in run'
CELL = '  File "<ipython-input-1-d778896f5460>", line 3 in <module>'
TORCH = '  File "/site/torch/nn/modules/module.py", line 1 in _call_impl'
CRASH, ABORTED = [CURRENT, CELL], ["Fatal Python error: Aborted", ""]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], []),
        (["last words", PRINTED], ["last words", PRINTED]),
        ([*ABORTED, HEAD, OWN, STDLIB, "x"], [*ABORTED, "x"]),
        ([HEAD, STDLIB, STDLIB, OWN], []),
        ([CURRENT, TORCH, CELL, OWN, OWN, STRING], [CURRENT, TORCH, CELL]),
        ([HEAD, STDLIB, CELL, STDLIB, HEAD, OWN, *CRASH], [HEAD, CELL, *CRASH]),
    ],
    ids=["none", "words", "runtime", "waits", "cell", "threads"],
)  # fmt: skip
def test_stacks_without_the_runtimes_frames(lines: list[str], left: list[str]) -> None:
    assert without_own_frames(lines) == left


def test_last_lines_are_ten_and_of_a_crash_the_first_ten() -> None:
    printed = [f"step {n}" for n in range(12)]
    assert last_lines(printed) == printed[2:]
    crash = ["Fatal Python error: Segmentation fault", CURRENT, *[CELL] * 30]
    assert last_lines([*printed, *crash]) == crash[:10]
    assert last_lines([*printed, *crash[:4]]) == [*printed[6:], *crash[:4]]
