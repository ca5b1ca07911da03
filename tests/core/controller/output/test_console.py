"""Folded output as plain text on stdout and stderr."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cellmesh.controller.output.calling_cell import current_sink
from cellmesh.controller.output.console import ConsoleSink, SilentSink, as_text, join_streams
from cellmesh.controller.output.fold import Block, Gap, Item, Line, Live

from ....support.blocks import TRACE, clear, line, rich


def live(*lines: tuple[tuple[int, ...], str], closed: bool = False) -> Block:
    return Block((0, 1), Live(lines, closed))


class File(io.StringIO):
    """A terminal, or another file."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def texts_of(*calls: tuple[Any, ...], is_terminal: bool = False, quiet: bool = False) -> list[str]:
    """What calls of a console's sink, (method, arguments), write to stdout and to stderr."""
    out, err = File(is_terminal), File(is_terminal)
    console = ConsoleSink(out, err)
    sink = SilentSink(console) if quiet else console
    for method, *arguments in calls:
        getattr(sink, method)(*arguments)
    return [out.getvalue(), err.getvalue()]


@pytest.mark.parametrize(
    ("item", "stream", "text"),
    [
        (Line("stdout", "hello"), "stdout", "[0-1] hello\n"),
        (Line("stderr", "oops"), "stderr", "[0-1] oops\n"),
        (Line("stdout", ""), "stdout", "[0-1] \n"),
        (TRACE, "stderr", "[0-1] Traceback (most recent call last)\n  line 1\nValueError: no\n"),
        (rich(0, kind="result", plain="42").item, "stdout", "[0-1] 42\n"),
        (rich(0, plain="two\nlines", html="<b>").item, "stdout", "[0-1]\ntwo\nlines\n"),
        (rich(0, html="<b>").item, "stdout", "[0-1] \n"),
        (clear(0).item, "stdout", ""),
        (
            Gap(12345, 6_700_000),
            "stdout",
            "[0-1] … 12,345 lines (6.7 MB) not shown; all of it: %dist_logs 0\n",
        ),
        (Live((((0, 1), "50%"),)), "stdout", ""),
        (Live((((0,), "100%"), ((1,), "99%")), True, "stderr"), "stderr", "[0] 100%\n[1] 99%\n"),
    ],
)
def test_blocks_as_text(item: Item, stream: str, text: str) -> None:
    assert as_text(Block((0, 1), item, ("", ""))) == (stream, text)


def test_neighbours_of_a_stream_are_joined() -> None:
    pieces = [("stdout", "a"), ("stdout", "b"), ("stderr", ""), ("stdout", "c"), ("stderr", "d")]
    assert join_streams(pieces) == [("stdout", "abc"), ("stderr", "d")]


@pytest.mark.parametrize(
    ("calls", "out", "err"),
    [
        (
            [("show", [line(0, 1), line(2, text="oh", stream="stderr"), line(2, text="more")])],
            "[0-1] text\n[2] more\n",
            "[2] oh\n",
        ),
        ([("note", "rank 3 died")], "", "rank 3 died\n"),
        ([("status", "1 of 4", False), ("status", "ready", True)], "ready\n", ""),
        ([("status", "waiting", False), ("status", "", True)], "", ""),
    ],
    ids=["lines", "a remark", "a status", "a status that is taken away"],
)
def test_a_file_gets_whole_lines_on_their_streams(calls: Any, out: str, err: str) -> None:
    assert texts_of(*calls) == [out, err]


def test_on_a_terminal_the_status_replaces_itself_and_output_takes_its_place() -> None:
    said = ("status", "1 of 4", False)
    assert texts_of(said, ("status", "ready", True), is_terminal=True)[0] == (
        "1 of 4\r\x1b[Kready\n"
    )
    long = ("status", "x" * 10_000, False)
    gone = ("status", "", True)
    out, err = texts_of(said, ("note", "remark"), long, gone, gone, is_terminal=True)
    assert out.startswith("1 of 4\r\x1b[Kx")
    assert out.endswith("x\r\x1b[K")
    assert out.count("x") < 1000
    assert err == "remark\n"


def test_the_console_writes_to_the_streams_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = current_sink()  # of a process without IPython
    assert isinstance(sink, ConsoleSink)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    sink.show([line(0), line(1, stream="stderr")])
    assert (out.getvalue(), err.getvalue()) == ("[0] text\n", "[1] text\n")


def test_the_silent_sink_shows_errors_and_remarks_only() -> None:
    blocks = [line(0), Block((0,), Gap(1, 1)), rich(0, plain="x"), live(((0,), "x"), closed=True)]
    shown = ("show", [*blocks, Block((1,), TRACE)])
    out, err = texts_of(shown, ("note", "remark"), ("status", "ready", True), quiet=True)
    assert out == ""
    assert err.startswith("[1] Traceback")
    assert err.endswith("remark\n")


@pytest.mark.parametrize("is_closed", [False, True])
def test_output_is_dropped_where_the_process_has_none(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO() if is_closed else None
    if file is not None:
        file.close()
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setattr("sys.stderr", file)
    sink = ConsoleSink()
    sink.status("starting", False)
    sink.note("a word")
    sink.show([line(0)])
