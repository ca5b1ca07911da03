"""`cellmesh run` as its users run it: programs, pipes, terminals and signals."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellmesh.wire.preload import list_path, read_preloads
from tests.conftest import clean_runtime_dir

COMMAND = [sys.executable, "-m", "cellmesh", "run"]
LIMIT_S = 60.0

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
for word in sys.argv[1:]:
    if word == "print":
        print("rank", rank)
    elif word == "bytes" and rank == 1:
        os.write(1, b"\\xff\\xfe\\n")
    elif word == "read":
        print(rank, sys.stdin.read().split())
    elif word == "fail" and rank == 1:
        raise ValueError("no more")
    elif word == "exit" and rank == 1:
        os._exit(9)
    elif word == "wait":
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
    elif word == "handle":
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("handled", rank)))
    elif word == "linger":
        import atexit, pathlib
        ends = pathlib.Path(__file__).with_name("ends").open("ab", buffering=0)
        atexit.register(lambda: [ends.write(b"end "), print("full"), time.sleep(1000)])
    elif word == "sleep":
        print("sleeping", rank, flush=True)
        time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A runtime directory of this module, whose runs are forked from the first one's zygote."""
    with clean_runtime_dir():
        yield


def run(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    line = [*COMMAND, *map(str, words)]
    more["errors"] = "surrogateescape"
    return subprocess.run(line, capture_output=True, timeout=LIMIT_S, **more)  # type: ignore[call-overload, no-any-return]


def test_output_of_ranks_is_unchanged_in_a_pipe_and_the_status_is_the_first_failures(
    script: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    options = ["-n", "2", "--log-dir", logs]
    done = run(*options, script, "print", "bytes", "read", "fail", "wait", input="a b")
    lines = ["0 ['a', 'b']", "1 []", "rank 0", "rank 1", "\udcff\udcfe"]
    assert sorted(done.stdout.splitlines()) == lines
    *traceback, last = done.stderr.splitlines()
    assert (traceback[0], traceback[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: no more",
    )
    assert last.startswith("cellmesh run: rank 1 raised ValueError: no more (train.py:12); rank 0 ")
    assert last.endswith("released")
    assert done.returncode == 1
    (launch,) = logs.iterdir()
    log = (launch / "attempt_0/1/stdout.log").read_bytes()
    assert log == b"rank 1\n\xff\xfe\n1 []\n"
    assert (launch / "attempt_0/1/stderr.log").read_text().endswith("ValueError: no more\n")
    # The second run is forked from the zygote that the first has left.
    died = run("-n", "2", script, "exit", "wait")
    assert died.returncode == 9
    assert "cellmesh run: rank 1 exited with code 9" in died.stderr


@contextlib.contextmanager
def in_terminal(*words: str | Path) -> Iterator[tuple[int, int]]:
    """The process of a run in a terminal of its own, and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [*COMMAND, *map(str, words)])
    try:
        yield pid, terminal
    finally:
        os.close(terminal)
        with contextlib.suppress(ChildProcessError):  # it has ended
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def read_until(terminal: int, text: str) -> str:
    """What a terminal shows until a text, or until its programs have ended."""
    shown, deadline = "", time.monotonic() + LIMIT_S
    while text not in shown or not text:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 1 << 16).decode()
            except OSError:  # the last program has closed it
                break
    return shown


def test_ctrl_c_and_a_hangup_in_a_terminal(script: Path) -> None:
    with in_terminal("-n", "2", script, "print", "sleep") as (pid, terminal):
        assert "[0" in read_until(terminal, "sleeping")  # marked with its ranks
        os.write(terminal, b"\x03")
        shown = read_until(terminal, "")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert "cellmesh run: ranks 0-1 raised KeyboardInterrupt" in shown
    assert "Traceback" not in shown.partition("cellmesh run:")[2]
    with in_terminal("-n", "2", script, "sleep") as (pid, terminal):
        read_until(terminal, "sleeping")
        os.kill(pid, signal.SIGHUP)
        read_until(terminal, "")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP


def test_signals_reach_ranks_and_a_killed_run_or_closed_pipe_leaves_none(script: Path) -> None:
    def begin(*words: str) -> subprocess.Popen[str]:
        line = [*COMMAND, "-n", "2", str(script), *words]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with begin("handle", "sleep") as handling:
        assert handling.stdout is not None
        for _ in range(2):
            assert handling.stdout.readline().startswith("sleeping")
        handling.terminate()
        assert sorted(handling.stdout) == ["handled 0\n", "handled 1\n"]
        assert handling.wait(LIMIT_S) == 128 + signal.SIGTERM
    with begin("sleep") as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.kill()
    with begin(*["print"] * 50_000, "sleep") as cut:
        assert cut.stdout is not None
        cut.stdout.readline()
        cut.stdout.close()
        assert cut.wait(LIMIT_S) == 128 + signal.SIGPIPE
        assert cut.stderr is not None
        assert cut.stderr.read() == ""
    with begin(*["print"] * 50_000, "sleep") as blocked:
        assert blocked.stdout is not None
        num_unread = array.array("i", [0])
        while num_unread[0] < 30_000:  # a pipe is full at 64 kB, or earlier
            fcntl.ioctl(blocked.stdout, termios.FIONREAD, num_unread)
            assert blocked.poll() is None
            time.sleep(0.01)
        blocked.send_signal(signal.SIGINT)
        assert blocked.wait(LIMIT_S) == 130
    with open("/dev/full", "w") as full:
        line = [*COMMAND, "-n", "1", script, "linger"]
        no_space = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert no_space.stderr == b"cellmesh run: stdout cannot be written: No space left on device\n"
    assert script.with_name("ends").read_text() == "end "  # not again, as the rank leaves


def test_a_mesh_that_lives_on_runs_more_scripts(script: Path, tmp_path: Path) -> None:
    options = ["-n", "2", "--keep", "10m", "--name", "dev"]
    kept = run(*options, script, "fail", "wait")  # rank 0 is released, and its groups are broken
    assert (kept.returncode, "`cellmesh shell dev`" in kept.stderr) == (1, True)
    shared = tmp_path / "shared.py"
    shared.write_text(
        "print('rank' in globals(), ValueError); loaded = globals().get('loaded', 0) + 1"
    )
    try:
        again = [run("--on", "dev", shared) for _ in range(2)]
        assert [(each.returncode, each.stderr) for each in again] == [(0, ""), (0, "")]
        shared.write_text("print('loaded', loaded)")
        assert run("--on", "dev", shared).stdout == "loaded 2\n" * 2
        with subprocess.Popen(
            [*COMMAND, "--on", "dev", str(script), "sleep"], stdout=subprocess.PIPE, text=True
        ) as busy:
            assert busy.stdout is not None
            busy.stdout.readline()
            refused = run("--on", "dev", script)
            assert refused.returncode == 1
            assert f"dev is held by process {busy.pid}, and runs train.py" in refused.stderr
            waiting = subprocess.Popen(
                [*COMMAND, "--on", "dev", "--wait", str(script), "print"],
                stdout=subprocess.PIPE,
                text=True,
            )
            busy.send_signal(signal.SIGINT)
            assert busy.wait(LIMIT_S) == 130
        assert sorted(waiting.communicate(timeout=LIMIT_S)[0].split("\n")) == [
            "",
            "rank 0",
            "rank 1",
        ]
        assert "did you mean 'dev'" in run("--on", "deb", script).stderr
    finally:
        stop = [sys.executable, "-m", "cellmesh", "stop", "dev"]
        subprocess.run(stop, check=True, capture_output=True, timeout=LIMIT_S)


def test_the_next_run_is_forked_with_installed_modules_that_scripts_of_the_project_import(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "takes_long.py").write_text("import time\ntime.sleep(0.1)\n")
    (tmp_path / "pyproject.toml").touch()
    script.write_text("import takes_long")
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    assert run("-n", "2", "--no-keep-warm", script).returncode == 0
    assert "takes_long" in read_preloads(list_path(str(tmp_path))).modules


def test_a_script_runs_again_after_each_edit(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    path.write_text("import time\nprint('first', flush=True)\ntime.sleep(1000)\n")
    line, pipe = [*COMMAND, "-n", "1", "--watch", str(path)], subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "first\n"
        # A result is no edit, which would interrupt the script, and run it again and again.
        path.write_text(
            "import time; open(f'{__file__}.json', 'w').close(); time.sleep(0.5); print('second')"
        )
        assert process.stdout.readline() == "second\n"
        assert any("waits for a change" in line for line in process.stderr)
        settings = path.with_name("settings")
        settings.touch()
        os.utime(settings, (time.time() + 1,) * 2)  # the times of files lag behind the clock
        settings.rename(settings.with_suffix(".json"))
        assert process.stdout.readline() == "second\n"
        path.write_text("print(")
        assert any("edited.py:1: SyntaxError" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
