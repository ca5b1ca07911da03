"""Timelines and profiles of hosts whose clocks really differ: a time namespace moves the monotonic
clock of one, and a library that is loaded before libc its system clock, which has no namespace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import cellmesh as cm
from cellmesh.controller.trace.operations import Operation

from .netns import Host, run

WAIT_S = 60.0
# By how much the clocks of cm2 are ahead.
MONOTONIC_S, SYSTEM_S = 5000, 3600
LATE_S = 0.4
# A busy machine may take so long from the reading of a clock to the begin of an all_reduce.
START_S = 0.15
LIBRARY = f"""
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {{
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec += {SYSTEM_S};
    return failed;
}}
"""
# Rank 2, which is the first one of cm2, begins the second all_reduce late.
LATE = f"""
import time
dist.all_reduce(torch.ones(1))
if rank == 2:
    time.sleep({LATE_S})
began_s = time.monotonic()
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def mesh(machines: list[Host], runtime_dir: Path, tmp_path: Path) -> Iterator[cm.Mesh]:
    """Two ranks on a host with the notebook's clocks, and two on one whose clocks are ahead."""
    (tmp_path / "ahead.c").write_text(LIBRARY)
    run("cc", "-shared", "-fPIC", "-o", f"{tmp_path}/ahead.so", f"{tmp_path}/ahead.c")
    ahead = (
        f"unshare --time --monotonic {MONOTONIC_S} --boottime {MONOTONIC_S} --fork "
        f"env LD_PRELOAD={tmp_path}/ahead.so {{command}}"
    )
    launch = (
        "ssh -o BatchMode=yes {host} "
        f"'if [ $(hostname) = cm2 ]; then exec {ahead}; else exec {{command}}; fi'"
    )
    with cm.start(hosts="cm1:2,cm2:2", launch=launch, lease_s=60) as mesh:
        clocks = mesh.run(lambda: (time.monotonic(), time.time())).list
        assert abs(clocks[2][0] - clocks[0][0] - MONOTONIC_S) < WAIT_S
        assert abs(clocks[2][1] - clocks[0][1] - SYSTEM_S) < WAIT_S
        yield mesh


def check_lateness(
    mesh: cm.Mesh, operations: Mapping[int, Sequence[Operation]], error_s: float
) -> None:
    """Compare how long ranks waited for rank 2 in the second all_reduce with what they read off
    their own clocks, which show the same time but for what was added.
    """
    began = mesh.pull("began_s").list
    late_s = [began[2] - MONOTONIC_S - began[rank] for rank in (0, 1)] + [began[2] - began[3]]
    assert sum(late_s) > 2 * LATE_S
    for rank, true_s in zip((0, 1, 3), late_s, strict=True):
        one = operations[rank][-1]
        assert (one.name, one.last) == ("all_reduce", 2)
        assert abs(one.waited_ns / 1e9 - true_s) <= error_s + START_S


def test_timeline_and_profile_are_on_one_clock(mesh: cm.Mesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profile = mesh.profile(LATE, trace=path)
    assert profile.history.took_s() < WAIT_S
    error_s = sum({clock.error_s for clock in profile.history.clocks.values()})
    assert profile.lateness[2].awaited_s > 2 * LATE_S
    check_lateness(mesh, profile.history.operations, error_s)
    assert f"cm2: {profile.history.clocks[2].offset_s:+,.4f} s ± " in "".join(profile.notes)
    events = json.loads(path.read_text())["traceEvents"]
    assert max(event["ts"] + event.get("dur", 0) for event in events) < WAIT_S * 1e6

    mesh.cell(LATE)
    history = mesh.timeline(1, trace=path)
    for rank, clock in history.clocks.items():
        assert clock.host == ("cm1", "cm2")[rank // 2]
        assert abs(clock.offset_s - (0, MONOTONIC_S)[rank // 2]) <= clock.error_s < LATE_S / 10
    error_s = sum({clock.error_s for clock in history.clocks.values()})
    assert history.straggler == 2
    check_lateness(mesh, history.operations, error_s)
    assert history.cells[0].end_ns - history.cells[0].begin_ns < WAIT_S * 1e9
    assert history.notes[-1].startswith("clocks of hosts, against the notebook's: cm1: ")
    assert json.loads(path.read_text())["traceEvents"]
