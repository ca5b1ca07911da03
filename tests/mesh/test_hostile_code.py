"""User code that changes what Python has, forks, or takes all threads: stop, release and heal work
on.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import time
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import RemoteError
from cellmesh.magics.render.tables import status_table

from .conftest import Recorder

WAIT_S = 60.0
RAISE = 'def no(*args, **kwargs): raise RuntimeError("can\'t start new thread")\n'


def replace(**names: str) -> tuple[str, str]:
    """Have these names of modules (``os__kill``) be something else, and back."""
    dotted = {name.replace("__", "."): value for name, value in names.items()}
    imports = "import " + ", ".join({name.partition(".")[0] for name in dotted}) + "\n"
    kept = "; ".join(f"kept[{name!r}] = {name}" for name in dotted)
    changed = "; ".join(f"{name} = {value}" for name, value in dotted.items())
    back = "; ".join(f"{name} = kept[{name!r}]" for name in dotted)
    return f"{imports}{RAISE}kept = {{}}; {kept}\n{changed}", f"{imports}{back}"


# As freezegun does it: whatever is a clock in any module is exchanged.
FREEZE = """
import sys, time
clocks = [time.monotonic, time.time, time.perf_counter]
clocks += [time.monotonic_ns, time.time_ns, time.perf_counter_ns]
froze = []
for module in list(sys.modules.values()):
    for name, value in list(getattr(module, "__dict__", {}).items()):
        is_clock = any(value is clock for clock in clocks)
        if is_clock and module.__name__ not in ("threading", "__main__"):
            froze.append((module, name, value))
for module, name, value in froze:
    setattr(module, name, lambda: 0.0)
"""
THAW = "for module, name, value in froze: setattr(module, name, value)"
SIGNAL = "import signal, os\n"
DEFAULT = "signal.signal(signal.SIGINT, signal.default_int_handler)"
UNBLOCK = "signal.pthread_sigmask(signal.SIG_SETMASK, [])"

OF_OS = ["kill", "killpg", "getpgrp", "dup", "fstat", "readlink", "listdir", "open"]
OF_OS += ["write", "read", "pread", "close"]

# What a cell does, and what another takes back.
CHANGES = {
    "a clock that stands": (FREEZE, THAW),
    "no thread left": replace(threading__Thread__start="no", _thread__start_new_thread="no"),
    "no Thread": replace(threading__Thread="None", threading__Timer="None",
                         threading__current_thread="no"),
    "no sockets": replace(socket__socket="None", select__poll="None", select__select="no"),
    "no os": replace(**{f"os__{name}": "no" for name in OF_OS}),
    "SIGINT ends": (f"{SIGNAL}signal.signal(signal.SIGINT, signal.SIG_DFL)", DEFAULT),
    "SIGINT handled": (f"{SIGNAL}signal.signal(signal.SIGINT, lambda *a: None)", DEFAULT),
    "signals blocked": (
        f"{SIGNAL}signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", UNBLOCK
    ),
    "no streams": (
        "import sys; streams = sys.stdout, sys.stderr; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout, sys.stderr = streams",
    ),
    "another default": ("torch.set_default_device('meta')", "torch.set_default_device(None)"),
    "warnings are errors": ("import warnings; "
"warnings.simplefilter('error')", "warnings.resetwarnings()"),
    "no path": (
        "import sys; paths = sys.path[:], sys.meta_path[:]; sys.path.clear(); "
        "sys.meta_path.clear()",
        "import sys; sys.path[:], sys.meta_path[:] = paths",
    ),
    "names taken": (
        "held = rank, dist, torch, mesh, device\nrank = mesh = device = get_ipython = display = "
        "None",
        "rank, dist, torch, mesh, device = held; del get_ipython, display",
    ),
    "a low limit": (
        "import sys\nfor limit in range(10, 200):\n    try: sys.setrecursionlimit(limit)\n"
        "    except RecursionError: continue\n    break",
        "import sys; sys.setrecursionlimit(1000)",
    ),
    "a profile that raises": (
        f"import sys\n{RAISE}sys.setprofile(no)", "import sys; sys.setprofile(None)",
    ),
    "a trace that raises": (
        f"import sys, threading\n{RAISE}sys.settrace(no)", "import sys; sys.settrace(None)",
    ),
}  # fmt: skip
# The rank itself raises then, wherever it is: the cell may fail.
HEALS_LATER = ("no thread left",)
MAY_FAIL = ("a low limit", "a profile that raises", "a trace that raises")
ALL_REDUCE = "t = T.ones(1, device='cpu'); D.all_reduce(t)"


def steps(mesh: cm.Mesh) -> None:
    mesh.submit_cell("import torch as T, torch.distributed as D").result(timeout_s=WAIT_S)
    mesh.submit_cell(ALL_REDUCE).result(timeout_s=WAIT_S)
    mesh.submit_cell("assert t.item() == 2").result(timeout_s=WAIT_S)


def wait_until_runs(mesh: Any) -> None:
    """Wait until every rank is in a cell."""
    deadline = time.monotonic() + WAIT_S
    while not all(state.run >= 0 for state in mesh.states().values()):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("name", CHANGES)
def test_stop_release_and_heal_work_all_the_same(name: str, quick: cm.Mesh) -> None:
    quick.cell("import torch as T, torch.distributed as D, time as C; sleep = C.sleep")
    pids = quick.run(os.getpid).list
    try:
        change_and_fail(name, quick)
    finally:
        quick.submit_cell(CHANGES[name][1]).result(timeout_s=WAIT_S)
    steps(quick)
    assert quick.run(os.getpid).list == pids


def change_and_fail(name: str, mesh: cm.Mesh) -> None:
    try:
        mesh.submit_cell(CHANGES[name][0]).result(timeout_s=WAIT_S)
    except cm.RankFailure:
        assert name in MAY_FAIL
    with pytest.raises(cm.RankFailure) as caught:
        mesh.submit_cell(f"if D.get_rank() == 0: 1 / 0\n{ALL_REDUCE}").result(timeout_s=WAIT_S)
    assert "ZeroDivisionError" in str(caught.value)
    assert "released" in str(caught.value)
    if name not in HEALS_LATER:
        steps(mesh)
    for waits in (
        "sleep(1000)",
        "while True: pass",
        f"if D.get_rank() == 0: {ALL_REDUCE}\nsleep(1000)",
    ):
        if name == "signals blocked" and "sleep" in waits:
            continue  # nothing reaches a thread that blocks all signals and sleeps
        # A run begins with the handler of SIGINT that is cellmesh's own.
        change = f"{CHANGES[name][0]}\n" if name == "SIGINT ends" else ""
        run = mesh.submit_cell(change + waits)
        wait_until_runs(mesh)
        run.interrupt()
        with pytest.raises((cm.RankFailure, KeyboardInterrupt)):
            run.result(timeout_s=WAIT_S)


# What a child does after ``pid = os.fork()``; its exit code; its words in the log.
CHILDREN = (
    ("cell", "pass", 0, None),
    ("cell", "if not pid: 1 / 0", 1, "ZeroDivisionError"),
    ("cell", "if not pid: raise type('X', (BaseException,), {'__str__': 3})", 1, ""),
    ("cell", "import sys\nif not pid: sys.exit(7)", 7, None),
    ("cell", "child = pid or os.fork()\nif pid == 0 and child: os.waitpid(child, 0)", 0, None),
    ("call", "if not pid: 1 / 0", 1, "ZeroDivisionError"),
    ("async cell", "if not pid: raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ("C code", "display(3)", 0, None),
    ("C code", "if not pid: 1 / 0", 1, "ZeroDivisionError"),
)
# As C code that calls Python back: without Python's hooks, and holding its lock.
FORK_IN_C = "import ctypes, os; os.fork = ctypes.PyDLL(None).fork; "


@pytest.mark.parametrize(("way", "body", "code", "shown"), CHILDREN)
def test_a_forked_child_that_returns_is_no_second_rank(
    way: str, body: str, code: int, shown: str | None, quick: cm.Mesh
) -> None:
    pids = quick.run(os.getpid).list
    source = f"import os, atexit\natexit.register(print, 'exit handler')\npid = os.fork()\n{body}"
    if way == "call":
        fork = eval("lambda source: (exec(source, names := {}), names['pid'])[1]", {})
        source = f"pid = {quick[1].submit(fork, source).result(timeout_s=WAIT_S)}"
    elif way == "async cell":
        source = f"import asyncio; await asyncio.sleep(0)\n{source}"
    elif way == "C code":
        source = f"{FORK_IN_C}\ntry:\n{textwrap.indent(source, '    ')}\nfinally: os.fork = fork"
        quick[1].cell("import os; fork = os.fork")
    quick[1].submit_cell(source).result(timeout_s=WAIT_S)
    quick[1].cell(f"import os\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == {code}")
    if shown is not None:
        who = rf"process \d+, forked from rank 1 \(process {pids[1]}\), raised:\s"
        wait_for_log(quick, rf"(?s){who}.*{shown}")
    for _ in range(3):
        steps(quick)
    assert quick.run(os.getpid).list == pids


def wait_for_log(mesh: cm.Mesh, pattern: str) -> None:
    """Wait until rank 1's log has this in what was written last."""
    deadline = time.monotonic() + WAIT_S
    while not ((log := mesh.read_log(1, 20_000)) and re.search(pattern, log.text)):
        assert time.monotonic() < deadline, log and log.text


def test_a_child_forked_in_a_thread_or_by_multiprocessing_ends_with_its_function(
    quick: cm.Mesh,
) -> None:
    quick[1].cell(
        "import multiprocessing as mp, os, threading\npids = []\n"
        "def work():\n    pid = os.fork()\n    pids.append(pid)\n    if not pid: 1 / 0\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 1\n"
        "with mp.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]"
    )
    steps(quick)


@pytest.mark.parametrize("kind", ["SystemExit", "MemoryError"])
def test_an_exception_does_not_end_the_control_thread(
    kind: str, quick: cm.Mesh, recorder: Recorder
) -> None:
    quick[1].cell(
        "import ctypes, threading\n"
        "for thread in threading.enumerate():\n    if thread.name.startswith('cellmesh-'):\n"
        "        ctypes.pythonapi.PyThreadState_SetAsyncExc(\n"
        f"            ctypes.c_ulong(thread.ident), ctypes.py_object({kind}))"
    )
    while set(quick.states()) != {0, 1}:  # a question that was being read may be lost
        pass
    run = quick.submit_cell("print('begun')\nimport time; time.sleep(1000)", sink=recorder)
    recorder.wait_for_line("begun")
    run.interrupt()
    with pytest.raises(KeyboardInterrupt):
        run.result(timeout_s=WAIT_S)
    steps(quick)


def test_a_failure_that_cannot_be_described_releases_the_others(quick: cm.Mesh) -> None:
    raises = (
        "raise type('X', (Exception,), {'__str__': lambda self: __import__('time').sleep(1e5)})"
    )
    run = quick.submit_cell(f"if rank == 1: {raises}\ndist.barrier()")
    with pytest.raises(cm.RankFailure, match="X") as caught:
        run.result(timeout_s=WAIT_S)
    # IPython asks each error for its text.
    assert type(caught.value.exceptions_by_rank[1]) is RemoteError
    steps(quick)


def test_rank_with_a_silent_control_thread_is_reported_and_replaced(
    own_mesh: cm.Mesh,
) -> None:
    own_mesh[1].cell(
        "import threading\nfrom cellmesh.workers.rank.control import ControlThread\n"
        "ControlThread._handle = lambda *_: threading.Event().wait()"
    )
    run = own_mesh.submit_cell("while True: pass")
    states = own_mesh.states()
    assert set(states) == {0}
    rows = status_table("", own_mesh.report(), states).rows
    assert "its control thread does not answer" in str(rows[1])
    for _ in range(2):
        run.interrupt()
    with pytest.raises(KeyboardInterrupt, match="rank 1 did not stop when interrupted: killed"):
        run.result(timeout_s=WAIT_S)
    own_mesh.heal()
    steps(own_mesh)


RAISING_TIMER = """
import signal, time
def tick(*_):
    raise TimeoutError("tick")
signal.signal(signal.SIGALRM, tick)
t = torch.ones(1)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.05)
    time.sleep(30)
else:
    dist.all_reduce(t)
"""


def test_groups_are_rebuilt_under_a_timer_whose_handler_raises(own_mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match="tick"):
        own_mesh.cell(RAISING_TIMER)
    while True:  # the timer may end this cell, too
        with contextlib.suppress(cm.RankFailure):
            own_mesh[0].cell("signal.setitimer(signal.ITIMER_REAL, 0)")
            break
    own_mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert own_mesh.pull("float(t)").list == [2.0, 2.0]
    assert not own_mesh.rank_set.session.dead_ranks
