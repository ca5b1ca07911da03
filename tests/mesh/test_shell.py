"""``cellmesh start`` and ``cellmesh shell`` as people type them, in a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest

WAIT_S = 60.0
_CONTROLS = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[>=])|\r")


def cellmesh(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cellmesh", *args]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def dev(runtime_dir: Path) -> Iterator[str]:
    """The line of a start; the mesh has two ranks and is held by nobody."""
    started = cellmesh("start", "2", "--name", "dev", "--mesh", "dp=2,tp=1", "--lease", "10m")
    assert (started.returncode, started.stderr) == (0, "")
    yield started.stdout
    stopped = cellmesh("stop", "dev")
    assert stopped.stdout.startswith("stopped dev: 2 ranks")


class Terminal:
    """A terminal with ``cellmesh shell`` in it, without colours and other controls."""

    def __init__(self, *args: str, **environment: str) -> None:
        given = {**os.environ, "TERM": "xterm", **environment}
        self._child = pexpect.spawn(
            sys.executable,
            ["-m", "cellmesh", "shell", *args],
            env={name: value for name, value in given.items() if value},
            encoding="utf-8",
            dimensions=(50, 150),
        )
        self._raw = self.text = ""

    def wait_for(self, text: str) -> None:
        """Wait until the terminal shows a text below those waited for before."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            try:
                self._raw += self._child.read_nonblocking(4096, timeout=1)
            except pexpect.TIMEOUT:
                continue
            self.text = _CONTROLS.sub("", self._raw)
        self._raw = self.text = self.text.partition(text)[2]

    def type(self, *lines: str, then: str) -> None:
        """Type lines, and wait for a text."""
        for line in lines:
            self._child.send(f"{line}\r")
        self.wait_for(then)

    def press(self, key: str, then: str) -> None:
        self._child.send(key)
        self.wait_for(then)

    def end(self, keys: str) -> str:
        """Leave the shell; return what it prints, once it has ended without an error."""
        self._child.send(keys)
        printed = self._child.expect(pexpect.EOF, timeout=WAIT_S)
        assert printed == 0
        self._child.close()
        assert self._child.exitstatus == 0
        return _CONTROLS.sub("", self._raw + self._child.before)


def test_lines_run_on_the_ranks_of_a_mesh_that_was_started_unattended(dev: str) -> None:
    assert dev.startswith("dev: 2 ranks ready in ")
    assert "lives for 10 min unattended: `cellmesh exec dev 'print(rank)'`, `cellmesh shell" in dev
    again = cellmesh("start", "2", "--name", "dev")
    assert (again.returncode, again.stdout) == (1, "")
    assert "a mesh of the name dev lives (process " in again.stderr
    assert "a shell needs a terminal: `cellmesh exec dev -`" in cellmesh("shell").stderr
    assert "there is no mesh 'dve'; did you mean 'dev'?" in cellmesh("shell", "dve").stderr

    terminal = Terminal("dev")
    terminal.wait_for("dev: 2 ranks (dp=2, tp=1), ready")
    terminal.wait_for("dev [0-1] In [1]: ")
    terminal.type("if rank:", "print('second', rank)", "", then="[1] second 1")
    terminal.wait_for("In [2]: ")
    terminal.type("import time; answer = input('which? ')", then="[0-1] which? ")
    terminal.type("forty-two", then="In [3]: ")
    terminal.press("answ\t", then="answer")
    terminal.type("", then="[0-1] 'forty-two'")
    terminal.wait_for("In [4]: ")
    terminal.type("print('a' + 'sleep', flush=True); time.sleep(600)", then="asleep")
    terminal.press("\x03", then="KeyboardInterrupt: interrupted in time.sleep at line 1")
    terminal.wait_for("In [5]: ")
    terminal.type("1 / (rank - rank)", then="ranks 0-1 raised ZeroDivisionError")
    terminal.wait_for("In [6]: ")
    terminal.type("%dist_auto on --at dp=1", then="cells run on rank 1 from here")
    terminal.wait_for("dev [1] In [7]: ")
    terminal.type("print('only', rank)", then="[1] only 1")
    terminal.wait_for("In [8]: ")
    terminal.type("%%local", "'ab' * 2", "", "", then="'abab'")
    terminal.wait_for("In [9]: ")
    assert "dev lives on for 10 min: `cellmesh shell dev` returns to it" in terminal.end("exit\r")

    terminal = Terminal("--ranks", "0", HOME="/proc/none", IPYTHONDIR="")
    terminal.wait_for("dev [0] In [1]: ")
    terminal.type("answer", then="[0] 'forty-two'")
    terminal.wait_for("In [2]: ")
    assert "Traceback" not in terminal.end("\x04")
