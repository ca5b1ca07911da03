"""Output: into the right cell, folded, bounded, from wherever it comes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.controller.output.fold import Gap, Rich, Trace
from cellmesh.errors import RanksInterrupted
from tests.conftest import FOLD
from tests.faults.watching import wait_until

from .conftest import Recorder

ALL = (0, 1, 2, 3)


def run_cell(mesh: cm.Ranks, source: str, recorder: Recorder, **options: Any) -> None:
    mesh.submit_cell(source, sink=recorder, **options).result(timeout_s=90)


def test_the_last_expression_is_shown_and_can_be_silenced(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    run_cell(mesh, "1 + 1", recorder)
    (block,) = recorder.items(Rich)
    assert block.ranks == ALL
    assert isinstance(block.item, Rich)
    assert json.loads(block.item.bundle)["data"] == {"text/plain": "2"}
    run_cell(mesh, "1 + 1;", recorder)
    run_cell(mesh, "_ + 40", recorder, quiet=True)
    assert len(recorder.items(Rich)) == 1
    assert mesh[0].pull("_") == 2


def test_text_from_below_python_is_the_ranks_and_the_cells(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    source = """
import os, subprocess, ctypes
os.write(1, b"descriptor\\n")
subprocess.run(["echo", "child"])
ctypes.CDLL(None).puts(b"libc")
print("python")
"""
    run_cell(mesh[3], source, recorder)
    lines = recorder.lines()
    assert {ranks for ranks, _ in lines} == {(3,)}
    assert {line for _, line in lines} == {"descriptor", "child", "libc", "python"}


def test_a_flood_is_bounded_and_whole_in_the_log(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(mesh, "for i in range(1_000_000): print(i)", recorder)
    num_shown = len(recorder.lines())
    skipped = sum(block.item.num_lines * len(block.ranks) for block in recorder.items(Gap))  # type: ignore[union-attr]
    assert num_shown < 200_000
    assert skipped > 1_000_000
    assert recorder.lines()[-1][1] == "999999"
    counted = subprocess.run(
        ["grep", "-c", "^[0-9]*$", str(mesh.log_path(1))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(counted.stdout) >= 1_000_000
    log = mesh.read_log(1, 100)
    assert log is not None
    assert log.text.endswith("999999\n")
    assert log.num_dropped_bytes > 1_000_000


LIBRARY_ERROR = "import torch\ndef f(x):\n    return torch.nn.Linear(2, 2)(x)\nf(torch.zeros(3))"
# What a traceback of `LIBRARY_ERROR` has, and what it has not.
XMODES = {
    "": (["In[7], line 3", "frames, to torch/nn"], ["site-packages", "x=tensor"]),
    "Plain": (["In[7], line 3", "torch/nn"], ["---->"]),
    "Verbose": (["In[7], line 3", "x=tensor", "site-packages/torch/nn"], ["frames, to"]),
    "Minimal": (["RuntimeError: "], ["In[7]", "torch/nn"]),
}


@pytest.mark.parametrize("mode", XMODES)
def test_tracebacks_follow_xmode_of_the_ranks(mesh: cm.Mesh, recorder: Recorder, mode: str) -> None:
    mesh.cell(f"%xmode {mode or 'Context'}")
    try:
        with pytest.raises(cm.RankFailure):
            run_cell(mesh, LIBRARY_ERROR, recorder, execution_count=7)
    finally:
        mesh.cell("%xmode Context")
    for block in recorder.items(Trace):
        assert isinstance(block.item, Trace)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", block.item.traceback)
        has, lacks = XMODES[mode]
        assert [text for text in has if text not in shown] == []
        assert [text for text in (*lacks, "cellmesh/") if text in shown] == []


CALLED_BY_C = {
    "callback of a future": """
future = torch.futures.Future()
later = future.then(stay)
future.set_result(1)
later.wait()
""",
    "autograd hook": """
x = torch.ones(3, requires_grad=True)
y = x * 2
y.register_hook(stay)
y.sum().backward()
""",
    "key of a sort": "sorted([1, 2], key=stay)",
    "hook of DDP": """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model.register_comm_hook(None, lambda state, bucket: stay())
model(torch.ones(1, 2)).sum().backward()
""",
}


@pytest.mark.parametrize("kind", CALLED_BY_C)
def test_an_interrupt_of_code_that_c_calls_is_the_interrupt_and_shows_no_frames(
    mesh: cm.Mesh, recorder: Recorder, kind: str
) -> None:
    source = f"""
import time, torch
def stay(*args):
    print("here")
    while True:
        time.sleep(0.01)
{CALLED_BY_C[kind]}
"""
    run = mesh.submit_cell(source, sink=recorder)
    recorder.wait_for_line("here")
    run.interrupt()
    with pytest.raises(RanksInterrupted, match="KeyboardInterrupt: interrupted in"):
        run.result(30)
    for block in recorder.items(Trace):
        assert isinstance(block.item, Trace)
        assert re.fullmatch(
            r"KeyboardInterrupt: interrupted in \S+ at line \d+(, called at line \d+)?",
            block.item.traceback,
        )


def test_an_error_is_shown_while_others_wait(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{FOLD}.HOLD_TRACE_S", 0.0)  # the others are released 2 s after it
    mesh.cell("import threading; gate = threading.Event()")
    run = mesh.submit_cell("if rank == 1:\n    1 / 0\ngate.wait()", sink=recorder)
    recorder.wait_for_trace((1,))
    assert run.waiting_ranks() == [0, 2, 3]
    with pytest.raises(
        cm.RankFailure, match=r"ranks 0,2-3 ran gate\.wait at line 3 and were released"
    ):
        run.result(20)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import sys; sys.exit(3)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def again(): again()\nagain()", "RecursionError"),
        ("%no_such_magic", "UsageError"),
        ("raise ExceptionGroup('several', [ValueError(1)])", "ExceptionGroup"),
        ("try: 1/0\nexcept Exception as e: raise e from e", "ZeroDivisionError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E()", "E"),
        ("__name__ = 3\nraise ValueError", "ValueError"),
        ("print('\\udc80'); raise ValueError('\\udc80')", "ValueError"),
    ],
)
def test_whatever_a_cell_raises_the_ranks_stay(
    mesh: cm.Mesh, source: str, name: str, recorder: Recorder
) -> None:
    mesh.cell("kept = rank")
    with pytest.raises(cm.RankFailure, match=name):
        run_cell(mesh, source, recorder)
    mesh.cell("__name__ = '__main__'")
    assert mesh.pull("kept").list == [0, 1, 2, 3]


def test_outside_a_notebook_output_goes_to_stdout_and_stderr(
    mesh: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.cell("import sys; print('out'); print('err', file=sys.stderr)")
    captured = capsys.readouterr()
    assert captured.out == "[0-3] out\n"
    assert captured.err == "[0-3] err\n"


def test_an_interrupt_ends_what_c_code_waits_for(mesh: cm.Mesh) -> None:
    mesh.cell("import os, subprocess")
    for source in ("os.system('sleep 1000')", "subprocess.run(['bash', '-c', 'sleep 1000; true'])"):
        run = mesh.submit_cell(source)
        workers = [psutil.Process(info.pid) for info in mesh.report()]

        def sleepers() -> list[psutil.Process]:
            children = [child for each in workers for child in each.children(recursive=True)]  # noqa: B023
            return [child for child in children if child.name() == "sleep"]

        wait_until(lambda: len(sleepers()) == len(workers), 20, "the ranks' sleep")  # noqa: B023
        asleep = sleepers()
        run.interrupt()
        assert run.wait(40)
        assert not psutil.wait_procs(asleep, timeout=40)[1]


# ---- scripts in cells

CLICK = (
    "import click\n@click.command()\n@click.option('--n', default={})\n"
    "def main(n):\n    if n: raise click.ClickException('no')\nmain()"
)


@pytest.mark.parametrize(
    "leave",
    [
        "exit()",
        "import sys; sys.exit()",
        "get_ipython().run_cell('1')\nexit()",
        "%%capture\nexit()",
        CLICK.format(0),
    ],
)
def test_an_exit_with_status_0_ends_the_cell_well(mesh: cm.Mesh, leave: str) -> None:
    first, _, rest = leave.partition("\n")
    magic, body = (first + "\n", rest) if first.startswith("%%") else ("", leave)
    mesh.cell(f"{magic}value = 'before'\n{body}\nvalue = 'after'")
    assert mesh.pull("value").list == ["before"] * 4


# Cells in which IPython shows a traceback and goes on, or that exit with another status.
FAILS = [
    ("exit(3)", "SystemExit: 3"),
    ("import sys; sys.exit('no data')", "SystemExit: no data"),
    (CLICK.format(1), "SystemExit: 1"),
    ("%run {}/fails.py --lr 0.1", r"no \['--lr', '0.1'\].*fails.py line 2, called at line 1"),
    ("import sys; sys.path.insert(0, '{}')\n%run -m fails", "ValueError: no"),
    ("%run {}/fails.ipy", "ZeroDivisionError"),
    ("%run {}/exits.py", "SystemExit: 7"),
    ("%%capture out\nprint('seen')\n1 / 0", "ZeroDivisionError"),
    ("get_ipython().run_cell('%run {}/fails.py')", "ValueError: no"),
    ("%cd {}/nowhere", "FileNotFoundError"),
    ("class Odd:\n    def _repr_html_(self): raise ValueError('no html')\nOdd()", "no html"),
]


@pytest.mark.parametrize(("source", "error"), FAILS)
def test_a_traceback_of_ipython_and_a_status_fail_the_cell(
    mesh: cm.Mesh, source: str, error: str, tmp_path: Path, recorder: Recorder
) -> None:
    (tmp_path / "fails.py").write_text("import sys\nraise ValueError(f'no {sys.argv[1:]}')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "fails.ipy").write_text("x = 1\n1 / 0\n")
    with pytest.raises(cm.RankFailure, match=error):
        run_cell(mesh, source.replace("{}", str(tmp_path)), recorder)
    assert not [line for _, line in recorder.lines() if "Traceback" in line]


def test_a_warning_names_its_cell(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(mesh, "import warnings\nwarnings.warn('old')", recorder, execution_count=7)
    assert "In[7]:2: UserWarning: old" in [line for _, line in recorder.lines()]


def test_the_peers_of_a_script_that_fails_are_released_and_show_nothing(
    quick: cm.Mesh, tmp_path: Path, recorder: Recorder
) -> None:
    (tmp_path / "waits.py").write_text(
        "import torch.distributed as dist\n"
        "if dist.get_rank(): raise ValueError('odd')\ndist.barrier()\n"
    )
    with pytest.raises(cm.RankFailure, match=r"rank 1 raised ValueError: odd.*rank 0 waited in"):
        run_cell(quick, f"%run {tmp_path}/waits.py\nafter = True", recorder)
    assert not [line for _, line in recorder.lines() if "Released" in line]
    assert quick.pull("'after' in globals()").list == [False, False]
