"""What is left of the stacks that a crash writes."""

from __future__ import annotations

import pytest

from cellmesh.workers.agent.crash_dump import without_own_frames

HEAD = "Thread 0x00007fb29d7106c0 (most recent call first):"
CURRENT = "Current thread 0x00007fb2bee0ab80 (most recent call first):"
OWN = '  File "/site/cellmesh/workers/shell.py", line 287 in _run_plainly'
STDLIB = '  File "/usr/lib/python3.11/threading.py", line 982 in run'
STRING = '  File "<string>", line 1 in <module>'
CELL = '  File "<ipython-input-1-d778896f5460>", line 3 in <module>'
TORCH = '  File "/site/torch/nn/modules/module.py", line 1 in _call_impl'
GROUPS = '  File "/site/cellmesh/workers/groups/groups.py", line 5 in all_reduce'


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], []),
        (["last words", STDLIB], ["last words", STDLIB]),
        (
            ["Fatal Python error: Aborted", "", HEAD, OWN, STDLIB, "x"],
            ["Fatal Python error: Aborted", "", "x"],
        ),
        ([HEAD, STDLIB, STDLIB, OWN], []),
        ([CURRENT, TORCH, CELL, OWN, OWN, STRING], [CURRENT, TORCH, CELL]),
        ([CURRENT, GROUPS, CELL, OWN, STRING], [CURRENT, GROUPS, CELL]),
        ([CURRENT, OWN, STRING, "end"], [CURRENT, OWN, STRING, "end"]),
        (
            [HEAD, STDLIB, CELL, STDLIB, HEAD, OWN, CURRENT, CELL],
            [HEAD, STDLIB, CELL, CURRENT, CELL],
        ),
        (["no head", OWN], ["no head", OWN]),
    ],
    ids=[
        "none",
        "words",
        "runtime",
        "waits",
        "cell",
        "between",
        "runtime crashes",
        "threads",
        "no head",
    ],
)
def test_stacks_without_the_runtimes_frames(lines: list[str], left: list[str]) -> None:
    assert without_own_frames(lines, "/site/cellmesh") == left
