"""Folded output as plain text on stdout and stderr."""

from __future__ import annotations

import io

import pytest

from cellmesh.controller.output.calling_cell import current_sink
from cellmesh.controller.output.console import ConsoleSink, SilentSink, Sink, as_text, join_streams
from cellmesh.controller.output.fold import (
    Block,
    Gap,
    Item,
    Line,
    Live,
)

from ....support.blocks import TRACE, clear, line, rich

# ---- text


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
    ],
    ids=["line", "stderr", "empty", "trace", "result", "lines", "no text", "clear", "gap"],
)
def test_blocks_as_text(item: Item, stream: str, text: str) -> None:
    assert as_text(Block((0, 1), item, ("", ""))) == (stream, text)


def test_neighbours_of_a_stream_are_joined() -> None:
    pieces = [("stdout", "a"), ("stdout", "b"), ("stderr", ""), ("stdout", "c"), ("stderr", "d")]
    assert join_streams(pieces) == [("stdout", "abc"), ("stderr", "d")]


# ---- the console


@pytest.fixture
def console() -> tuple[ConsoleSink, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return ConsoleSink(out, err), out, err


Console = tuple[ConsoleSink, io.StringIO, io.StringIO]


def test_the_console_shows_lines_on_their_streams(console: Console) -> None:
    sink, out, err = console
    sink.show([line(0, 1), line(2, text="warning", stream="stderr"), line(2, text="more")])
    assert out.getvalue() == "[0-1] text\n[2] more\n"
    assert err.getvalue() == "[2] warning\n"


def test_the_console_shows_unfinished_lines_once_they_are_finished(console: Console) -> None:
    sink, out, _ = console
    sink.show([Block((0, 1), Live((((0, 1), "50%"),)))])
    assert out.getvalue() == ""
    sink.show([Block((0, 1), Live((((0,), "100%"), ((1,), "99%")), closed=True))])
    assert out.getvalue() == "[0] 100%\n[1] 99%\n"


def test_the_console_shows_remarks_on_stderr(console: Console) -> None:
    sink, out, err = console
    sink.note("rank 3 died")
    assert (out.getvalue(), err.getvalue()) == ("", "rank 3 died\n")


def test_without_a_terminal_only_the_final_status_is_shown(console: Console) -> None:
    sink, out, _ = console
    sink.status("1 of 4", final=False)
    sink.status("ready", final=True)
    assert out.getvalue() == "ready\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_status_replaces_itself() -> None:
    out = Terminal()
    sink = ConsoleSink(out)
    sink.status("1 of 4", final=False)
    sink.status("ready", final=True)
    assert out.getvalue() == "1 of 4\r\x1b[Kready\n"


def test_on_a_terminal_output_takes_the_place_of_the_status() -> None:
    out = Terminal()
    sink = ConsoleSink(out, out)
    sink.status("waiting", final=False)
    sink.note("remark")
    sink.status("x" * 10_000, final=False)
    sink.status("", final=True)
    sink.status("", final=True)
    text = out.getvalue()
    assert text.startswith("waiting\r\x1b[Kremark\nx")
    assert text.endswith("x\r\x1b[K")
    assert text.count("x") < 1000


def test_a_status_that_is_taken_away_leaves_nothing_in_a_file(console: Console) -> None:
    sink, out, _ = console
    sink.status("waiting", final=False)
    sink.status("", final=True)
    assert out.getvalue() == ""


def test_the_console_writes_to_the_streams_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ConsoleSink()
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    sink.show([line(0), line(1, stream="stderr")])
    assert (out.getvalue(), err.getvalue()) == ("[0] text\n", "[1] text\n")


def test_outside_a_kernel_output_goes_to_the_console() -> None:
    assert isinstance(current_sink(), ConsoleSink)


# ---- silence


def test_the_silent_sink_shows_errors_and_remarks_only(console: Console) -> None:
    console_sink, out, err = console
    sink: Sink = SilentSink(console_sink)
    sink.show(
        [
            line(0),
            Block((0,), Gap(1, 1)),
            rich(0, plain="x"),
            Block((0,), Live((((0,), "x"),), True)),
            Block((1,), TRACE),
        ]
    )
    sink.note("remark")
    sink.status("ready", True)
    assert out.getvalue() == ""
    assert err.getvalue().startswith("[1] Traceback")
    assert err.getvalue().endswith("remark\n")


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
