"""Deadlines that say what hangs, and waiting for a condition."""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cellmesh as cm
from cellmesh.controller.output.fold import Block, Line, Trace
from cellmesh.workers.rank.stack_inspection import stacks_of_threads
from tests.conftest import processes_named, processes_of

from .rows import FLOOD

# How many times as long as in the table a report of a fault may take in tests: how soon it is there
# is for the table and the long soak to say; the machine of a test may be slow and have other work.
PATIENCE = 6.0
_DIAGNOSIS_S = 120.0
# Name of the threads of `deadline`.
WATCHDOG = "watchdog"


class Stuck(AssertionError):
    """Something took longer than it may; says where everybody was."""


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, what: str = "a condition"
) -> float:
    """Wait for a condition that can only be asked for; returns how long that took."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise Stuck(f"{what}: not within {timeout_s} s")
        pause.wait(0.003)
    return time.monotonic() - began


def runs_in(thread: int, code: types.CodeType) -> bool:
    """Whether a thread of this process is in a function, or in what that calls."""
    return any(frame.f_code is code for frame in stacks_of_threads().get(thread, ()))


@contextlib.contextmanager
def deadline(
    directory: Path, timeout_s: float, what: str, mesh: cm.Mesh | None = None
) -> Iterator[None]:
    """Whatever hangs inside ends with `Stuck`: after the time-out the mesh, whose runtime directory
    this is, is asked for states and stacks, and its agent is killed.
    """
    done = threading.Event()
    diagnoses: list[str] = []

    def watch() -> None:
        if done.wait(timeout_s):
            return
        diagnoses.append(diagnose(directory, mesh))
        for process in processes_named(directory, "cellmesh-agent"):
            process.kill()

    watcher = threading.Thread(target=watch, name=WATCHDOG, daemon=True)
    watcher.start()
    # Should not even that help, the process says where it is and ends.
    faulthandler.dump_traceback_later(timeout_s + _DIAGNOSIS_S, exit=True, file=sys.__stderr__)
    try:
        try:
            yield
        finally:
            done.set()
            watcher.join()
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:
        if diagnoses:
            raise Stuck(f"{what}: not within {timeout_s} s\n{diagnoses[0]}") from error
        raise
    if diagnoses:
        raise Stuck(f"{what}: not within {timeout_s} s\n{diagnoses[0]}")


def diagnose(directory: Path, mesh: cm.Mesh | None) -> str:
    """Where everybody is, as far as it can be told."""
    parts = []
    if mesh is not None:
        for title, ask in (
            ("states", lambda: "\n".join(map(str, mesh.states().items()))),
            ("report", lambda: "\n".join(map(str, mesh.report()))),
            ("stacks", lambda: mesh.stacks(all_threads=True)),
        ):
            parts.append(f"-- {title}\n{_try(ask)}")
    parts.append(f"-- this process\n{_own_stacks()}")
    parts += [
        f"-- {log.name}\n{log.read_text()[-3000:]}"
        for log in directory.glob("cellmesh/*/logs/agent.log")
    ]
    for process in processes_of(directory):
        parts.append(f"-- {process.pid} {_try(process.name)}\n{_spy(process.pid)}")
    return "\n".join(parts)


def _try(ask: Callable[[], str]) -> str:
    answers: list[str] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as e:
            answers.append(f"{type(e).__name__}: {e}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(6.0)
    return answers[0] if answers else "no answer"


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def _spy(pid: int) -> str:
    py_spy = str(Path(sys.executable).with_name("py-spy"))
    command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return (found.stdout or found.stderr)[-3000:]


class Shown:
    """A sink that remembers what was shown, and when; of a flood, the number of its lines."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.texts: list[str] = []
        self.num_flood_lines = 0
        self.first_trace_at: float | None = None

    def show(self, blocks: Sequence[Block]) -> None:
        with self._changed:
            for block in blocks:
                if isinstance(block.item, Trace):
                    self.first_trace_at = self.first_trace_at or time.time()
                    self.texts.append(block.item.traceback)
                elif isinstance(block.item, Line):
                    if FLOOD in block.item.text:
                        self.num_flood_lines += 1
                    else:
                        self.texts.append(block.item.text)
            self._changed.notify_all()

    def note(self, text: str) -> None:
        with self._changed:
            self.texts.append(text)
            self._changed.notify_all()

    def status(self, text: str, final: bool) -> None:
        self.note(text)

    def wait_for(self, part: str, timeout_s: float) -> None:
        """Wait until something was shown that has this in it."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(part in text for text in self.texts), timeout_s
            ):
                raise Stuck(
                    f"{part!r} was not shown within {timeout_s} s: {self.texts[-20:]} and "
                    f"{self.num_flood_lines} lines of a flood"
                )
