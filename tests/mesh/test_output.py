"""Output: into the right cell, folded, bounded, from wherever it comes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.output.fold import Gap, Live, Rich, Trace
from cellmesh.errors import RanksInterrupted
from cellmesh.workers.rank.stdout import LOG_BYTES
from tests.conftest import FOLD

from .conftest import Recorder

ALL = (0, 1, 2, 3)


def run_cell(mesh: cm.Ranks, source: str, recorder: Recorder, **options: Any) -> None:
    mesh.submit_cell(source, sink=recorder, **options).result(timeout_s=90)


def test_output_is_shown_while_the_cell_runs(mesh: cm.Mesh, recorder: Recorder) -> None:
    mesh.cell("import threading; gate = threading.Event()")
    run = mesh.submit_cell("print('before'); gate.wait(); print('after')", sink=recorder)
    recorder.wait_for_line("before")
    assert not run.done()
    run.interrupt()
    run.wait(20)


def test_stderr_and_streams_keep_their_order_on_a_rank(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(
        mesh[0], "import sys\nfor i in range(3): print(i); print(i, file=sys.stderr)", recorder
    )
    assert [line for _, line in recorder.lines()] == ["0", "0", "1", "1", "2", "2"]


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


def test_ipythons_comforts_work(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(
        mesh[2],
        "!echo shell $RANK\n%timeit -n1 -r1 pass\nimport asyncio\nawait asyncio.sleep(0)",
        recorder,
    )
    lines = [line for _, line in recorder.lines()]
    assert lines[0] == "shell 2"
    assert "loop" in lines[1]


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


def test_workers_of_a_data_loader_print_too(mesh: cm.Mesh, recorder: Recorder) -> None:
    source = """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        print("item", i, flush=True)
        return i
total = sum(int(x) for x in DataLoader(Numbers(), num_workers=1))
"""
    run_cell(mesh[0], source, recorder)
    assert {"item 0", "item 1"} <= {line for _, line in recorder.lines()}
    assert mesh[0].pull("total") == 1


def test_carriage_returns_update_one_line_for_each_rank(mesh: cm.Mesh, recorder: Recorder) -> None:
    source = """
import sys, time
for i in range(4):
    print(f"\\rstep {i} of {rank}", end="", file=sys.stderr)
    time.sleep(0.15)
print(file=sys.stderr)
"""
    run_cell(mesh, source, recorder)
    [*_, last] = recorder.items(Live)
    assert last.item == Live(tuple(((r,), f"step 3 of {r}") for r in ALL), True, "stderr")
    assert recorder.lines() == []


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


def test_a_flood_from_below_python_is_bounded(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(
        mesh[0], "import subprocess; subprocess.run('yes | head -c 50000000', shell=True)", recorder
    )
    assert len(recorder.lines()) < 100_000
    assert recorder.items(Gap)


def test_one_print_of_200_mb(mesh: cm.Mesh, recorder: Recorder) -> None:
    run_cell(mesh[0], "print('x' * 200_000_000)\nprint('done')", recorder)
    assert sum(len(line) for _, line in recorder.lines()) < 1_000_000
    assert recorder.lines()[-1][1].endswith("done")
    sizes = [path.stat().st_size for path in mesh.log_path(0).parent.glob("rank0.log*")]
    assert LOG_BYTES <= sum(sizes) < 2.1 * LOG_BYTES


def test_lines_of_another_cell_are_named_with_it_on_both_sides(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    source = """
import torch.distributed as dist
def step():
    if rank == 1:
        raise ValueError("odd")
    dist.barrier()
"""
    run_cell(mesh, source, recorder, execution_count=8)
    words = (
        r"rank 1 raised ValueError: odd \(In\[8\] line 4, called at line 2\); ranks 0,2-3 waited "
        r"in barrier at In\[8\] line 5, called at line 2, for \d+\.\d s and were released"
    )
    with pytest.raises(cm.RankFailure, match=words):
        run_cell(mesh, "x = 1\nstep()", recorder, execution_count=9)


def test_frames_of_torch_are_one_line_and_the_whole_is_kept(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    source = "import torch\ntorch.nn.Sequential(torch.nn.Linear(2, 2))(torch.zeros(3))"
    with pytest.raises(cm.RankFailure, match=r"cannot be multiplied|size mismatch"):
        run_cell(mesh, source, recorder, execution_count=7)
    [block] = recorder.items(Trace)
    assert block.ranks == ALL
    assert isinstance(block.item, Trace)
    shown, whole = (
        re.sub(r"\x1b\[[0-9;]*m", "", text) for text in (block.item.traceback, block.item.whole)
    )
    assert re.search(r"\[\.\.\. \d+ frames of torch, to torch/nn/modules/linear\.py:", shown)
    assert "site-packages" not in shown
    assert "(torch.zeros(3))" in shown
    assert whole.count("site-packages/torch/") > 4
    assert "cellmesh" not in shown + whole


LIBRARY_ERROR = "import torch\ndef f(x):\n    return torch.nn.Linear(2, 2)(x)\nf(torch.zeros(3))"
# What a traceback of `LIBRARY_ERROR` has, and what it has not.
XMODES = {
    "": (["In[7], line 3", "frames of torch, to torch/nn"], ["site-packages", "x=tensor"]),
    "Plain": (["In[7], line 3", "frames of torch, to torch/nn"], ["site-packages", "---->"]),
    "Verbose": (["In[7], line 3", "x=tensor", "site-packages/torch/nn"], ["frames of torch"]),
    "Minimal": (["RuntimeError: "], ["In[7]", "torch/nn"]),
}


@pytest.mark.parametrize("place", ["ranks", "notebook"])
@pytest.mark.parametrize("mode", XMODES)
def test_tracebacks_follow_xmode_of_the_ranks_and_of_the_notebook(
    mesh: cm.Mesh, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, mode: str, place: str
) -> None:
    if place == "notebook":
        monkeypatch.setattr("cellmesh.controller.ranks.own_xmode", lambda: mode)
    else:
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


def test_a_warning_names_its_cell(mesh: cm.Mesh, recorder: Recorder) -> None:
    source = "import warnings\n\nwarnings.warn('old')"
    run_cell(mesh, source, recorder, execution_count=27)
    lines = [text for _, text in recorder.lines()]
    assert lines == ["In[27]:3: UserWarning: old", "  warnings.warn('old')"]


def test_an_interrupt_that_c_code_has_wrapped_is_the_interrupt(
    mesh: cm.Mesh, recorder: Recorder
) -> None:
    source = """
import time
def wait():
    try:
        print("here")
        time.sleep(60)
    except KeyboardInterrupt as stop:
        text = repr(stop)
    raise RuntimeError(f"Cannot extract tensors from value: {text}")
wait()
"""
    run = mesh.submit_cell(source, sink=recorder)
    recorder.wait_for_line("here")
    run.interrupt()
    with pytest.raises(RanksInterrupted, match="KeyboardInterrupt: interrupted in wait"):
        run.result(20)


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
    "autograd function": """
class Function(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad: stay())
Function.apply(torch.ones(3, requires_grad=True)).sum().backward()
""",
    "__torch_function__": """
class Own(torch.Tensor):
    __torch_function__ = classmethod(stay)
torch.ones(2).as_subclass(Own) + 1
""",
    "pickle": "import pickle\nclass Own:\n    __reduce__ = stay\npickle.dumps([Own()])",
    "key of a sort": "sorted([1, 2], key=stay)",
    "finalizer": "class Own:\n    __del__ = stay_a_moment\ndel [Own()][0]\nstay()",
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
def stay_a_moment(*args):
    print("here")
    until = time.monotonic() + 1
    while time.monotonic() < until:
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
    ],
)
def test_whatever_a_cell_raises_the_ranks_stay(
    mesh: cm.Mesh, source: str, name: str, recorder: Recorder
) -> None:
    mesh.cell("kept = rank")
    with pytest.raises(cm.RankFailure, match=name):
        run_cell(mesh, source, recorder)
    assert mesh.pull("kept").list == [0, 1, 2, 3]


def test_outside_a_notebook_output_goes_to_stdout_and_stderr(
    mesh: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh.cell("import sys; print('out'); print('err', file=sys.stderr)")
    captured = capsys.readouterr()
    assert captured.out == "[0-3] out\n"
    assert captured.err == "[0-3] err\n"


def test_a_plain_script_works(tmp_path: Any, runtime_dir: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import cellmesh as cm\n"
        "def f(): return rank * 2\n"
        "if __name__ == '__main__':\n"
        "    with cm.start(2) as mesh:\n"
        "        print(mesh.run(f).list)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[0, 2]"


def test_a_release_in_new_group_names_no_error_of_ours(mesh: cm.Mesh) -> None:
    with pytest.raises(
        cm.RankFailure, match=r"waited in new_group at line 3 (for \S+ s )?and were released"
    ):
        mesh.cell("if rank == 1:\n    raise ValueError('odd')\ndist.new_group()")
