"""A run's output from what ranks say to what is written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from cellmesh.controller.output.cell import CellSink
from cellmesh.controller.output.console import ConsoleSink, SilentSink
from cellmesh.controller.output.fold import HOLD_S
from cellmesh.controller.output.printer import Printer
from cellmesh.wire.messages import Died, Done, Failed
from cellmesh.wire.verbs import Bar, BarState, Display, Output

FAILED = Failed(1, "ValueError", "no", "Traceback: no", 3)
DIED = Died(1, "killed by SIGKILL", "last\nwords")
Shown = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def printer_to(out: io.StringIO, num_ranks: int, shows_traces: bool = True) -> Printer:
    return Printer(range(num_ranks), ConsoleSink(out, out), shows_traces)


def printer_in_cell(num_ranks: int, **options: Any) -> tuple[Printer, Shown]:
    """A printer in a notebook's cell, and the messages that the cell is sent."""
    shown: Shown = []
    sink = CellSink(lambda kind, content: shown.append((kind, content)), **options)
    return Printer(range(num_ranks), sink), shown


def feed(printer: Printer, *said: tuple[int | tuple[int, ...], Any], now: float = 0.0) -> None:
    """Ranks print a text, send a verb, or end the run."""
    for who, verb in said:
        ranks = (who,) if isinstance(who, int) else who
        if isinstance(verb, Done | Failed | Died):
            printer.settle(ranks, verb, now)
        else:
            verb = Output(1, "stdout", verb) if isinstance(verb, str) else verb
            printer.feed(ranks, verb, now)


def test_fed_output_is_shown_at_its_deadline(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.feed((0,), Output(1, "stdout", "mine\n"), 5.0)
    assert printer.deadline() == pytest.approx(5.0 + HOLD_S)
    printer.show(5.0)
    assert out.getvalue() == ""
    printer.show(5.0 + HOLD_S)
    assert out.getvalue() == "[0] mine\n"
    assert printer.deadline() is None


@pytest.mark.parametrize(
    ("fed", "shown"),
    [
        ([(1, Done(1)), (0, "alone\n")], "[0] alone\n"),
        ([(1, "before"), (1, FAILED), (0, Done(1))], "[1] before\n[1] Traceback: no\n"),
        ([(1, "last\nwords"), (1, DIED)], "[1] last\n[1] words\nrank 1 killed by SIGKILL\n"),
    ],
    ids=["ended", "failed", "died"],
)
def test_the_end_of_a_rank_is_shown_below_its_last_lines_at_once(
    out: io.StringIO, fed: Sequence[tuple[int, Any]], shown: str
) -> None:
    printer = printer_to(out, 2)
    feed(printer, *fed)
    printer.show(0.0)
    assert out.getvalue() == shown


def test_where_output_is_not_shown_deaths_are_with_their_last_lines_and_raised_failures_not(
    out: io.StringIO,
) -> None:
    printer = printer_to(out, 1, shows_traces=False)
    printer.settle((0,), FAILED, 0.0)
    printer.show(0.0, everything=True)
    assert out.getvalue() == ""
    feed(Printer((0, 1), SilentSink(ConsoleSink(out, out))), (1, "last\nwords"), (1, DIED))
    assert out.getvalue() == "rank 1 killed by SIGKILL; its last lines:\n    last\n    words\n"


def test_advice_stands_above_the_status_line_until_that_goes() -> None:
    printer, shown = printer_in_cell(1)
    printer.advise("press again")
    printer.status("rank 0 runs")
    printer.status("")
    printer.status("rank 0 runs")
    assert [(kind, content["data"]["text/plain"]) for kind, content in shown] == [
        ("display_data", "press again"),
        ("update_display_data", "press again\nrank 0 runs"),
        ("update_display_data", ""),
        ("display_data", "rank 0 runs"),
    ]


def test_remark_follows_the_output_before_it(out: io.StringIO) -> None:
    printer = printer_to(out, 1)
    printer.feed((0,), Output(1, "stdout", "line\n"), 0.0)
    printer.note("remark", 0.0)
    printer.advise("press again")  # a remark where text cannot be taken back
    printer.status("")
    assert out.getvalue() == "[0] line\nremark\npress again\n"


def test_output_after_the_end_is_in_the_tabs_a_second_later() -> None:
    printer, messages = printer_in_cell(2, has_tabs=True)
    feed(printer, (0, "same\nof 0\n"), (1, "same\nof 1\n"))
    printer.finish(0.0)
    assert [kind for kind, _ in messages] == ["stream", "display_data"]
    assert printer.deadline() is None
    feed(printer, (1, "late\n"), now=10.0)
    printer.show(11.0)
    assert messages[-1][0] == "stream"
    due = printer.deadline()
    assert due == 12.0
    printer.show(due)
    assert messages[-1][0] == "update_display_data"
    assert "late" in str(messages[-1][1])
    assert printer.deadline() is None


def test_an_animation_is_shown_ten_times_a_second_and_ends_with_its_end() -> None:
    printer, messages = printer_in_cell(1)
    for step in range(1000):
        feed(printer, (0, Display(1, "clear", b"wait")), (0, f"{step}\n"), now=step / 1000)
        printer.show(step / 1000)
    printer.finish(1.0)
    assert sum(kind == "clear_output" for kind, _ in messages) <= 12
    assert "[0] 999" in str(messages[-1][1])


def bar(done: float, state: BarState = "open", number: int = 1) -> Bar:
    return Bar(1, number, "train", done, 10.0, 1.0, rate=5.0, state=state)


def test_a_bar_stands_between_what_was_printed_before_and_after_it() -> None:
    printer, shown = printer_in_cell(2)
    both = (0, 1)
    feed(printer, (both, "before\n"), (both, bar(0)), (both, "within\n"))
    printer.show(0.0)
    feed(printer, (both, bar(10, "done")), (both, bar(10, "done", number=2)), now=1.0)
    printer.show(1.0)
    printer.show(2.0, everything=True)
    kinds = ["stream", "display_data", "stream", "update_display_data", "display_data"]
    assert [kind for kind, _ in shown] == kinds
    assert [shown[at][1]["text"] for at in (0, 2)] == ["[0-1] before\n", "[0-1] within\n"]
    assert "100 %" in shown[3][1]["data"]["text/plain"]
    assert shown[3][1]["transient"] == shown[1][1]["transient"]
    feed(printer, (both, bar(5, number=3)), now=3.0)  # and after the run
    due = printer.deadline()
    assert due is not None
    printer.show(due)
    assert "5/10" in shown[-1][1]["data"]["text/plain"]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_a_bar_stands_between_what_each_of_its_ranks_said_whichever_was_first(
    out: io.StringIO, order: tuple[int, ...]
) -> None:
    printer = printer_to(out, 3)
    for at, rank in enumerate(order):
        end = FAILED if rank == 1 else Done(1)
        said = ((rank, f"before on {rank}\n"), (rank, bar(10, "done")), (rank, end))
        feed(printer, *said, now=at / 1000)
    printer.show(1.0)
    words = [line.split()[1] for line in out.getvalue().splitlines()]
    assert words == ["before", "before", "before", "train", "Traceback:"]


def test_the_bar_of_a_rank_that_died_has_ended(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    feed(printer, (1, bar(3)), (1, DIED))
    printer.show(1.0)
    assert "3/10  5 it/s, in 1.0 s" in out.getvalue()


def test_beside_much_output_frames_are_drawn_once_a_second() -> None:
    printer, shown = printer_in_cell(2)
    feed(printer, (1, "x" * 1_000_000 + "\n"))
    drawn_at = []
    for tenths in range(30):
        feed(printer, (0, Display(1, "clear", b"wait")), (0, "frame\n"), now=tenths / 10)
        before = len(shown)
        printer.show(tenths / 10 + 0.05)
        if len(shown) > before:
            drawn_at.append(tenths)
    _, *later = drawn_at  # the first frame redraws nothing
    assert len(later) == 3


def test_exception_that_a_rank_has_printed_itself_is_not_shown_again(out: io.StringIO) -> None:
    printer = printer_to(out, 1)
    feed(printer, (0, "Traceback: no\n"), (0, Failed(1, "ValueError", "no", "", 0)))
    printer.finish(1.0)
    assert out.getvalue() == "[0] Traceback: no\n"


def test_remarks_name_the_mesh_where_a_process_has_several() -> None:
    out = io.StringIO()
    heads = iter(("bb:", ""))
    printer = Printer((0,), ConsoleSink(out, out), heading=lambda is_first: next(heads))
    printer.note("rank 1 was killed by SIGKILL")
    printer.note("rank 1 is new")
    assert out.getvalue() == "bb: rank 1 was killed by SIGKILL\nrank 1 is new\n"
