"""The output of a script: unchanged in a pipe, folded on a terminal, and in files."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cellmesh.cli.script_output import LINE_S, LogFiles, ScriptPrinter, Stdin
from cellmesh.controller.output.console import as_text
from cellmesh.controller.output.fold import Block
from cellmesh.wire.messages import Died, Failed
from cellmesh.wire.verbs import InputCancelled, InputRequest, Output, StreamName


class Screen:
    """What was written, in order: (stream, text); folded text has its ranks before it."""

    def __init__(self, **options: Any) -> None:
        self.written: list[tuple[str, str]] = []
        self.replies: queue.Queue[tuple[Mapping[int, int], str, bool]] = queue.Queue()
        self.printer = ScriptPrinter([0, 1], self, self.write, Stdin(self.reply), **options)

    def write(self, stream: StreamName, data: bytes) -> None:
        self.written.append((stream, data.decode()))

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool) -> None:
        self.replies.put((requests, text, is_end))

    def show(self, blocks: list[Block]) -> None:
        self.written += map(as_text, blocks)

    def note(self, text: str) -> None:
        self.written.append(("stderr", f"note: {text}"))

    def status(self, text: str, final: bool) -> None: ...

    def feed(self, rank: int, text: str, now: float = 0.0, stream: StreamName = "stdout") -> None:
        self.printer.feed((rank,), Output(1, stream, text), now)
        self.printer.show(now)

    def take(self) -> str:
        taken, self.written = self.written, []
        return "".join(text for _, text in taken)


def test_text_is_unchanged_and_at_once_in_a_pipe() -> None:
    screen = Screen(raw=["stdout", "stderr"])
    screen.feed(0, "a\nb\n")
    screen.printer.feed((0, 1), Output(1, "stderr", "c\n"), 0)
    assert screen.written == [("stdout", "a\nb\n"), ("stderr", "c\n"), ("stderr", "c\n")]


def test_bytes_that_are_no_text_are_unchanged_in_a_pipe_and_in_log_files(tmp_path: Path) -> None:
    written: list[bytes] = []
    logs = LogFiles(tmp_path, {0: ["stdout"]}, pytest.fail)
    screen = Screen(raw=["stdout"], logs=logs)
    screen.printer._write = lambda stream, data: written.append(data)
    for text, data in (("\ufffd", b"\xff\xc3"), ("é\n", b"\xa9\n"), ("end", b"")):
        screen.printer.feed((0,), Output(1, "stdout", text, data), 0)
    screen.printer.finish(0)
    assert b"".join(written) == b"\xff\xc3\xa9\nend"
    assert (tmp_path / "attempt_0/0/stdout.log").read_bytes() == b"\xff\xc3\xa9\nend"


def test_lines_of_ranks_do_not_mix_unless_they_stay_unfinished() -> None:
    screen = Screen(raw=["stdout"])
    screen.feed(0, "step", 0.0)
    screen.feed(1, "step 7\n", 0.01)
    screen.feed(0, " 3\n", 0.02)
    assert screen.take() == "step 7\nstep 3\n"
    screen.feed(0, "x\nloading ...", 1.0)
    assert (screen.take(), screen.printer.deadline()) == ("x\n", 1.0 + LINE_S)
    screen.printer.show(1.0 + LINE_S)
    assert (screen.take(), screen.printer.deadline()) == ("loading ...", None)
    screen.feed(0, "\r 10%", 2.0)
    assert screen.take() == "\r 10%"
    screen.feed(0, "the end", 3.0)
    screen.printer.finish(3.0)
    assert screen.take() == "the end"


def test_streams_of_a_terminal_are_folded() -> None:
    screen = Screen(raw=["stderr"])
    screen.printer.feed((0, 1), Output(1, "stdout", "step 3\n"), 0)
    screen.printer.show(0)
    screen.feed(1, "oops\n", stream="stderr")
    assert screen.take() == "[0-1] step 3\noops\n"


def test_failures_are_left_to_the_last_line() -> None:
    screen = Screen()
    screen.printer.settle((0,), Failed(1, "ValueError", "no", "", 1), 0)
    screen.printer.settle((1,), Died(1, "exited with code 3", ""), 0)
    screen.printer.finish(0)
    assert screen.take() == ""


def test_files_have_what_is_hidden(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path, {0: {"stdout"}, 1: {"stdout", "stderr"}}, pytest.fail)
    screen = Screen(raw=["stdout", "stderr"], logs=logs, hidden={1: {"stdout", "stderr"}})
    for rank in (0, 1):
        screen.feed(rank, f"rank {rank}\n")
    screen.feed(1, "ValueError: no\n", stream="stderr")
    assert screen.take() == "rank 0\n"
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "rank 0\n",
        "attempt_0/1/stdout.log": "rank 1\n",
        "attempt_0/1/stderr.log": "ValueError: no\n",
    }


def test_a_full_disk_of_log_files_is_reported_once_and_output_is_still_shown(
    tmp_path: Path,
) -> None:
    errors: list[OSError] = []
    screen = Screen(raw=["stdout"], logs=LogFiles(tmp_path, {0: {"stdout"}}, errors.append))
    (path,) = tmp_path.rglob("*.log")
    path.unlink()
    path.symlink_to("/dev/full")
    screen.feed(0, "a\n")
    screen.feed(0, "b\n")
    assert [error.errno for error in errors] == [errno.ENOSPC]
    assert screen.take() == "a\nb\n"


@pytest.fixture
def keyboard() -> Iterator[int]:
    """The end of a pipe from which this process reads its standard input, to write to."""
    read_end, write_end = os.pipe()
    before = os.dup(0)
    os.dup2(read_end, 0)
    os.close(read_end)
    yield write_end
    for each in readers():
        each.join(5)
        assert not each.is_alive()
    os.dup2(before, 0)
    os.close(before)


def readers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "cellmesh-stdin"]


def test_standard_input_is_read_when_a_script_asks(keyboard: int) -> None:
    screen = Screen()
    ask, answers = screen.printer.feed, screen.replies
    os.write(keyboard, b"a\xe4\n")
    ask((0,), InputRequest(1, 7, "", is_raw=True), 0)
    assert answers.get(timeout=5) == ({0: 7}, "a\xe4\n", False)
    ask((0,), InputRequest(1, 8, "", is_raw=True), 0)
    ask((0,), InputCancelled(1, 8), 0)
    os.write(keyboard, b"for the next request")
    ask((0,), InputRequest(1, 9, "", is_raw=True), 0)
    assert answers.get(timeout=5) == ({0: 9}, "for the next request", False)
    os.close(keyboard)
    ask((0,), InputRequest(1, 10, "", is_raw=True), 0)
    assert answers.get(timeout=5) == ({0: 10}, "", True)


def test_a_prompt_is_shown_before_the_answer(keyboard: int) -> None:
    screen = Screen()
    screen.feed(0, "name? ")
    screen.printer.feed((0,), InputRequest(1, 7, "", is_raw=True), 0)
    assert screen.take() == "[0] name? \n"
    os.write(keyboard, b"a\n")
    assert screen.replies.get(timeout=5) == ({0: 7}, "a\n", False)


def test_input_is_left_to_others_when_a_run_ends(keyboard: int) -> None:
    screen = Screen()
    screen.printer.feed((0,), InputRequest(1, 7, "", is_raw=True), 0)
    (reader,) = readers()
    screen.printer.finish(0)
    reader.join(5)
    assert not reader.is_alive()
    os.write(keyboard, b"for the shell\n")
    assert os.read(0, 100) == b"for the shell\n"
