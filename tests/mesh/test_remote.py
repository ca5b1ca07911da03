"""``cellmesh exec`` and its like on living meshes: alone, beside each other, beside a holder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cellmesh as cm
from cellmesh.controller.acts import Exec
from cellmesh.controller.session.guests import NAME, Request
from cellmesh.errors import RanksInterrupted
from cellmesh.wire.ticket import read_ticket, runtime_root
from tests.conftest import clean_runtime_dir

from .conftest import Recorder
from .test_kernel import open_notebook

WAIT_S = 40.0
# A cell that says where it is, and waits there for a file.
GATED = "import pathlib, time\nprint('in')\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.02)"


def begin(*args: str) -> subprocess.Popen[str]:
    """Start the command as a process, as a shell does."""
    command = [sys.executable, "-m", "cellmesh", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str], given: str = "") -> tuple[int, str, str]:
    """Wait for a command; return its exit code and what it printed."""
    out, err = process.communicate(given, timeout=WAIT_S)
    return process.returncode, out, err


def run(*args: str, given: str = "") -> tuple[int, str, str]:
    return finish(begin(*args), given)


def run_json(*args: str) -> Any:
    _, out, _ = run(*args, "--json")
    return json.loads(out)


def wait_for_text(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in iter(process.stdout.readline, ""))


def wait_for_remark(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    assert text in process.stderr.readline()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The runtime directory of ``dev``, two ranks that nobody holds."""
    with clean_runtime_dir() as directory:
        cm.start(2, name="dev", lease_s=600, settle_s=0.3).detach()
        yield directory
        assert run("stop", "dev")[0] == 0


@pytest.fixture
def held(directory: Path) -> Iterator[cm.Mesh]:
    """``dev``, held by this process."""
    mesh = cm.attach("dev", sink=Recorder())
    yield mesh
    if mesh.alive:
        mesh.detach()


@pytest.mark.usefixtures("directory")
def test_a_cell_shows_its_output_and_value(tmp_path: Path) -> None:
    assert run("exec", "dev", "--ranks", "1", "print('hi'); rank") == (0, "[1] hi\n[1] 1\n", "")
    assert run("exec", "--ranks", "0", "-", given="%pylab?\nx = 7")[0] == 0
    (tmp_path / "cell.py").write_text("x + 1")
    assert run("exec", "dev", "--at", "dp=0", "-f", str(tmp_path / "cell.py"))[1] == "[0] 8\n"
    assert run("pull", "dev", "{'x': [x, torch.ones(3)]}")[1] == "{'x': [7, 'Tensor[3]']}\n"
    assert run_json("ps")[0]["state"] == "detached"


@pytest.mark.usefixtures("directory")
def test_a_failed_cell_is_told_as_json_and_the_mesh_goes_on() -> None:
    code = "print('on', rank)\nif rank:\n    raise ValueError('bad')\ndist.barrier()"
    status, out, err = run("exec", "dev", "--json", code)
    told = json.loads(out)
    assert (status, err.count("\n")) == (1, 1)
    assert "rank 1 raised ValueError: bad (line 3); rank 0 waited in" in err
    assert told["released"] == [0]
    mine, theirs = told["groups"]
    assert (mine["ranks"], mine["stdout"], mine["exception"]["released"]) == ([0], "on 0\n", True)
    raised = theirs["exception"]
    assert (raised["type"], raised["message"], raised["line"]) == ("ValueError", "bad", 3)
    assert "----> 3     raise ValueError('bad')" in raised["traceback"]
    told = run_json("exec", "dev", "dist.barrier(); display('d'); 'v'")
    assert [(g["ranks"], g["displays"], g["value"]) for g in told["groups"]] == [
        ([0, 1], ["'d'"], "'v'")
    ]


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(
    ("args", "status", "error"),
    [
        (["exec", "dve", "1"], 1, "there is no mesh 'dve'; did you mean 'dev'? (running: dev)"),
        (["exec", "dev", "x = ("], 1, "SyntaxError: '(' was never closed (line 1)"),
        (["exec", "dev", "--ranks", "0", "input()"], 1, "EOFError: nobody can be asked: the cell"),
        (["exec", "--timeout", "0.3", "while True: pass"], 124, "not done after 0.3 s, and"),
        (["pull", "dev", "los"], 1, "rank 0 raised NameError: name 'los' is not defined"),
        (["logs", "dev", "7"], 1, "there is no rank 7"),
    ],
)
def test_each_failure_is_one_line_and_a_status(args: list[str], status: int, error: str) -> None:
    done, _, err = run(*args)
    assert done == status
    assert error in err.splitlines()[-1]


@pytest.mark.usefixtures("directory")
def test_commands_beside_a_running_one_answer_or_wait(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = begin("exec", "dev", "--ranks", "0", GATED.format(str(gate)))
    wait_for_text(first, "in")
    second = begin("exec", "dev", "--ranks", "0", "print('second')")
    assert "time.sleep(0.02)" in run("stacks", "dev", "--ranks", "0")[1]
    assert "running time.sleep at line 3" in run("status", "dev")[1]
    assert run("exec", "dev", "--timeout", "0.3", "1")[0] == 124
    wait_for_remark(second, "a command, whose end this one awaits: `cellmesh status dev` shows")
    gate.touch()
    assert finish(first)[0] == 0
    assert finish(second)[:2] == (0, "[0] second\n")


@pytest.mark.usefixtures("directory")
def test_output_of_an_earlier_run_is_kept_for_the_next_notebook(tmp_path: Path) -> None:
    mesh, recorder = cm.attach("dev", sink=Recorder()), Recorder()
    code = f"{GATED.format(str(tmp_path / 'gate'))}\nprint('out')\n1 / 0"
    mesh[0].submit_cell(code, sink=recorder)
    recorder.wait_for_line("in")
    mesh.detach()
    assert "In[" in run("status", "dev")[1]
    waiting = begin("exec", "dev", "--ranks", "0", "print('next')")
    wait_for_remark(waiting, "which still runs: `cellmesh interrupt dev` interrupts both")
    (tmp_path / "gate").touch()
    assert finish(waiting) == (0, "[0] next\n", "")
    recorder = Recorder()
    again = cm.attach("dev", sink=recorder)
    try:
        recorder.wait_for_line("out")
        recorder.wait_for_line("\x1b[31mZeroDivisionError\x1b[39m: division by zero")
        assert not any(text == "next" for _, text in recorder.lines())
    finally:
        again.detach()


def test_a_guest_waits_for_its_turn_and_the_holder_is_shown_a_line(
    held: cm.Mesh, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate, recorder = tmp_path / "gate", Recorder()
    mine = held[0].submit_cell(GATED.format(str(gate)) + "\norder = ['mine']", sink=recorder)
    recorder.wait_for_line("in")
    guest = begin("exec", "dev", "--ranks", "0", "order.append('guest'); print(order)")
    while len(held.runs) < 2:
        assert guest.poll() is None
        time.sleep(0.02)
    line = capfd.readouterr().err
    assert f"`cellmesh exec` (process {guest.pid}) runs: order.append('guest'); print(" in line
    assert "time.sleep(0.02)" in run("stacks", "dev", "--ranks", "0")[1]
    gate.touch()
    assert finish(guest)[:2] == (0, "[0] ['mine', 'guest']\n")
    mine.result()
    # `| head` reads no more than a line, and the cell runs once all the same.
    code = "order += ['cut']\nfor i in range(20000): print(i)"
    with begin("exec", "dev", "--ranks", "0", code) as cut:
        wait_for_text(cut, "0")
        assert cut.stdout is not None
        cut.stdout.close()
    assert cut.returncode == 0
    assert held[0].pull("order") == ["mine", "guest", "cut"]
    assert run_json("exec", "dev", "1 / 0")["groups"][0]["exception"]["type"] == (
        "ZeroDivisionError"
    )
    assert run("heal", "dev")[0] == 0


def test_a_guest_interrupts_its_own_run_and_a_killed_one_leaves_it(held: cm.Mesh) -> None:
    # The signal arrives while output is shown.
    stopped = begin("exec", "dev", "while True: print('in')")
    wait_for_text(stopped, "in")
    mine = held.submit_cell("mine = 1")
    stopped.send_signal(signal.SIGINT)
    status, _, err = finish(stopped)
    assert (status, "raised KeyboardInterrupt" in err) == (130, True)
    mine.result()
    killed = begin("exec", "dev", "print('in', flush=True)\nwhile True: pass")
    wait_for_text(killed, "in")
    killed.kill()
    finish(killed)
    (left,) = held.runs
    assert run("interrupt", "dev")[1].startswith("interrupted cell ")
    with pytest.raises(RanksInterrupted):
        left.result()


def test_a_guest_ends_with_its_holder(held: cm.Mesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    guest = begin("exec", "dev", "--ranks", "0", GATED.format(str(gate)))
    wait_for_text(guest, "in")
    held.detach()
    status, _, err = finish(guest)
    assert (status, err.count("\n")) == (1, 1)
    assert f"dev was held by process {os.getpid()}, and has left or ended it" in err
    gate.touch()


def test_a_guest_without_the_key_gets_no_answer(held: cm.Mesh, directory: Path) -> None:
    path = runtime_root() / "dev" / NAME
    assert path.stat().st_mode & 0o777 == 0o600
    key = read_ticket(runtime_root() / "dev" / "ticket.json").key
    wrong = Request("0" * len(key), os.getpid(), Exec(source="stolen = 1"))
    for line in (msgspec.json.encode(wrong), b"{}", b'{"key": 1}', b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(str(path))
            stranger.sendall(line + b"\n")
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    assert held.pull("'stolen' in globals()") == {0: False, 1: False}


def test_a_command_runs_in_the_mesh_of_a_kernel(runtime_dir: Path) -> None:
    with open_notebook() as notebook:
        assert notebook.run("%load_ext cellmesh").status == "ok"
        assert notebook.run("%dist_start 2 --name lab").status == "ok"
        assert notebook.run("%%dist\nx = 10 + rank").status == "ok"
        assert run("exec", "lab", "--ranks", "1", "x += 1; x") == (0, "[1] 12\n", "")
        shown = notebook.run("%dist_pull x --all --as x\nprint(x.list)")
        assert "[10, 12]" in shown.text()
        assert notebook.run("%dist_stop").status == "ok"
