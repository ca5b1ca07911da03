"""Folded output as plain text on stdout and stderr, or where the notebook's code captures it."""

from __future__ import annotations

import io
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher, DisplayPublisher

from cellmesh.controller.output import calling_cell
from cellmesh.controller.output.cell import CellSink
from cellmesh.controller.output.console import ConsoleSink, SilentSink, as_text, in_terminal
from cellmesh.controller.output.fold import Block, Gap, Item, Line, Live

from ....support.blocks import TRACE, Recorder, clear, line, rich


def live(text: str, closed: bool = False) -> Block:
    return Block((0, 1), Live((((0, 1), text),), closed))


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
        (TRACE, "stderr", "[0-1] Traceback (most recent call last)\n  line 1\nValueError: no\n"),
        (rich(0, kind="result", plain="42").item, "stdout", "[0-1] 42\n"),
        (rich(0, plain="two\nlines", html="<b>").item, "stdout", "[0-1]\ntwo\nlines\n"),
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


def test_a_file_gets_the_last_status_and_remarks() -> None:
    calls = [("note", "rank 3 died"), ("status", "1 of 4", False), ("status", "ready", True)]
    gone = [("status", "waiting", False), ("status", "", True)]
    assert texts_of(*calls, *gone) == ["ready\n", "rank 3 died\n"]


@pytest.mark.parametrize(
    ("text", "for_commands"),
    [
        ("`%dist_heal --from 0` copies", "`cellmesh heal dev --from 0` copies"),
        ("stop it with %dist_interrupt, then", "stop it with cellmesh interrupt dev, then"),
        ("`%dist_attach a`, or `%dist_stop a`", "`cellmesh shell a`, or `cellmesh stop a`"),
        ("`%dist_stop`, not `%dist_restart`", "`cellmesh stop dev`, not `%dist_restart`"),
        ("start it with `%dist_start` or cellmesh.start()", "start it with `cellmesh start`"),
    ],
)
def test_next_steps_for_users_of_commands_are_commands(text: str, for_commands: str) -> None:
    assert in_terminal(text, "dev") == for_commands
    console = ConsoleSink(err := io.StringIO(), err, "dev")
    console.note(text)
    console.show([line(0, text="%dist_heal")])  # of a user's program
    console.show([Block((0,), Gap(1, 1))])
    remark, own, gap = err.getvalue().splitlines()
    assert (remark, own) == (for_commands, "[0] %dist_heal")
    assert gap.endswith("all of it: cellmesh logs dev 0")


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
    sink = calling_cell.current_sink()  # of a process without IPython
    assert isinstance(sink, ConsoleSink)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    sink.show([line(0), line(1, stream="stderr")])
    assert (out.getvalue(), err.getvalue()) == ("[0] text\n", "[1] text\n")


def test_the_silent_sink_shows_errors_and_remarks_only() -> None:
    blocks = [line(0), Block((0,), Gap(1, 1)), rich(0, plain="x"), live("x", closed=True)]
    shown = ("show", [*blocks, Block((1,), TRACE)])
    out, err = texts_of(shown, ("note", "remark"), ("status", "ready", True), quiet=True)
    assert out == ""
    assert err.startswith("[1] Traceback")
    assert err.endswith("remark\n")


def test_output_is_dropped_where_the_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for file in (closed, None):
        monkeypatch.setattr("sys.stdout", file)
        monkeypatch.setattr("sys.stderr", file)
        sink = ConsoleSink()
        sink.status("starting", False)
        sink.note("a word")
        sink.show([line(0)])


def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cell whose output is captured as by ``%%capture``."""
    out, err, front = io.StringIO(), io.StringIO(), Recorder()
    shell = SimpleNamespace(
        display_pub=CapturingDisplayPublisher(),
        display_pub_class=DisplayPublisher,
        kernel=types.SimpleNamespace(iopub_socket=None),
    )
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", SimpleNamespace(OutStream=File))
    monkeypatch.setattr(calling_cell, "own_shell", lambda: shell)
    monkeypatch.setattr(calling_cell, "CellPublisher", lambda kernel: front)
    return SimpleNamespace(
        out=out, err=err, front=front, shell=shell, sink=calling_cell.current_sink()
    )


def test_text_is_captured_by_stream_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(monkeypatch)
    captured.sink.show([line(0), line(1, stream="stderr"), rich(0, kind="result", plain="42")])
    captured.sink.note("remark")
    captured.sink.show([live("50 %")])  # a line that is redrawn, once it has ended
    captured.sink.show([live("100 %", closed=True)])
    assert captured.out.getvalue() == "[0] text\n[0] 42\n[0-1] 100 %\n"
    assert captured.err.getvalue() == "[1] text\nremark\n"
    assert captured.front.messages == []


def test_displays_are_captured_below_their_labels_with_their_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = capture(monkeypatch)
    captured.sink.show([rich(0, png="AAAA"), rich(1, png="BBBB", ids=("b",))])
    captured.sink.show([rich(1, kind="update", ids=("b",), plain="two")])
    (above, first, below, second, third) = captured.shell.display_pub.outputs
    assert [each["data"]["image/png"] for each in (first, second)] == ["AAAA", "BBBB"]
    assert [each["data"]["text/plain"] for each in (above, below, third)] == ["[0]", "[1]", "two"]
    assert (second["update"], third["update"]) == (False, True)
    assert second["transient"] == third["transient"] != {}
    captured.sink.show([clear(0)])
    assert captured.shell.display_pub.outputs == []
    assert captured.front.messages == []


def test_errors_and_the_status_are_shown_in_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(monkeypatch)
    captured.sink.show([Block((0,), TRACE)])
    assert captured.front.kinds == ["error"]
    captured.sink.status("starting", False)
    assert captured.front.area[1:] == [{"text/plain": "starting"}]
    captured.sink.status("ready", True)
    assert captured.front.area[1:] == [{"text/plain": ""}]
    assert (captured.out.getvalue(), captured.err.getvalue()) == ("ready\n", "")


def test_only_what_is_still_captured_is_not_shown_in_the_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = capture(monkeypatch)
    captured.shell.display_pub = DisplayPublisher()
    captured.sink.show([line(0), rich(0, html="<b>"), line(1, stream="stderr")])
    assert captured.front.kinds == ["display_data", "display_data"]
    captured.out.write = None  # a file that fails
    captured.sink.show([line(0), line(1, stream="stderr")])
    assert captured.err.getvalue() == "[1] text\n[1] text\n"
    monkeypatch.setattr("sys.stdout", File())
    captured.sink.show([line(0)])
    assert captured.front.kinds[2:] == ["stream"]
    of_a_later_cell = io.StringIO()
    monkeypatch.setattr("sys.stdout", of_a_later_cell)
    captured.sink.show([line(0)])
    assert captured.front.kinds[2:] == ["stream", "stream"]
    assert of_a_later_cell.getvalue() == ""
    monkeypatch.setattr("sys.stdout", File())
    monkeypatch.setattr("sys.stderr", None)
    assert isinstance(calling_cell.current_sink(), CellSink)
