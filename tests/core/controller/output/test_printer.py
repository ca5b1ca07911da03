"""A run's output from what ranks say to what is written."""

from __future__ import annotations

import io
import itertools
from typing import Any

import msgspec
import pytest

from cellmesh.controller.output.cell import CellSink
from cellmesh.controller.output.console import ConsoleSink, SilentSink
from cellmesh.controller.output.fold import HOLD_S
from cellmesh.controller.output.printer import Printer
from cellmesh.wire.messages import Died, Done, Failed
from cellmesh.wire.user_code import Bar, BarState, Display, Output

FAILED = Failed(1, "ValueError", "no", "Traceback: no", 3)


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def printer_to(out: io.StringIO, num_ranks: int, shows_traces: bool = True) -> Printer:
    return Printer(range(num_ranks), ConsoleSink(out, out), shows_traces)


def test_fed_output_is_shown_at_its_deadline(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.feed((0,), Output(1, "stdout", "mine\n"), 0.0)
    assert printer.deadline() == pytest.approx(HOLD_S)
    printer.show(0.0)
    assert out.getvalue() == ""
    printer.show(HOLD_S)
    assert out.getvalue() == "[0] mine\n"
    assert printer.deadline() is None


def test_ranks_that_have_ended_are_not_waited_for(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.settle((1,), Done(1), 0.0)
    printer.feed((0,), Output(1, "stdout", "alone\n"), 0.0)
    printer.show(0.0)
    assert out.getvalue() == "[0] alone\n"


def test_a_failure_is_shown_below_what_was_printed(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.feed((1,), Output(1, "stdout", "before"), 0.0)
    printer.settle((1,), FAILED, 0.0)
    printer.settle((0,), Done(1), 0.0)
    printer.show(0.0, everything=True)
    assert out.getvalue() == "[1] before\n[1] Traceback: no\n"


def test_failures_that_are_only_raised_are_not_shown(out: io.StringIO) -> None:
    printer = printer_to(out, 1, shows_traces=False)
    printer.settle((0,), FAILED, 0.0)
    printer.show(0.0, everything=True)
    assert out.getvalue() == ""


def test_death_is_shown_at_once_below_the_last_lines(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.feed((1,), Output(1, "stdout", "last\nwords"), 0.0)
    printer.settle((1,), Died(1, "killed by SIGKILL", "last\nwords"), 5.0)
    assert out.getvalue() == "[1] last\n[1] words\nrank 1 killed by SIGKILL\n"


def test_death_is_shown_with_the_last_lines_where_output_is_not(out: io.StringIO) -> None:
    printer = Printer((0, 1), SilentSink(ConsoleSink(out, out)))
    printer.feed((1,), Output(1, "stdout", "last\nwords"), 0.0)
    printer.settle((1,), Died(1, "killed by SIGKILL", "last\nwords"), 5.0)
    assert out.getvalue() == "rank 1 killed by SIGKILL; its last lines:\n    last\n    words\n"


def test_advice_stands_above_the_status_line_until_that_goes() -> None:
    sent: list[tuple[str, str]] = []
    printer = Printer(
        (0,), CellSink(lambda kind, content: sent.append((kind, content["data"]["text/plain"])))
    )
    printer.advise("press again")
    printer.status("rank 0 runs")
    printer.status("")
    printer.status("rank 0 runs")
    assert sent == [
        ("display_data", "press again"),
        ("update_display_data", "press again\nrank 0 runs"),
        ("update_display_data", ""),
        ("display_data", "rank 0 runs"),
    ]


def test_advice_is_a_remark_where_text_cannot_be_taken_back(out: io.StringIO) -> None:
    printer = printer_to(out, 1)
    printer.advise("press again")
    printer.status("")
    assert out.getvalue() == "press again\n"


def test_remark_follows_the_output_before_it(out: io.StringIO) -> None:
    printer = printer_to(out, 1)
    printer.feed((0,), Output(1, "stdout", "line\n"), 0.0)
    printer.note("remark", 0.0)
    assert out.getvalue() == "[0] line\nremark\n"


def test_on_a_console_a_finished_bar_stands_above_what_its_rank_printed_next(
    out: io.StringIO,
) -> None:
    printer = printer_to(out, 2)
    printer.feed((0, 1), Output(1, "stderr", "\r50%"), 0.0)
    printer.show(1.0)
    printer.feed((0,), Output(1, "stderr", "\r100%\n"), 2.0)
    printer.feed((0,), Output(1, "stdout", "saved\n"), 2.0)
    printer.show(3.0)
    printer.feed((1,), Output(1, "stderr", "\r100%\n"), 4.0)
    printer.feed((1,), Output(1, "stdout", "saved\n"), 4.0)
    printer.show(5.0, everything=True)
    lines = out.getvalue().splitlines()
    for rank in (0, 1):
        seen = [text.partition("] ")[2] for text in lines if rank in _ranks_of(text)]
        assert seen == ["100%", "saved"]


def test_on_a_console_an_unfinished_line_ends_up_on_its_stream() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = Printer((0,), ConsoleSink(out, err))
    printer.feed((0,), Output(1, "stderr", "\r50%"), 0.0)
    printer.show(1.0)
    printer.feed((0,), Output(1, "stderr", "\r100%\n"), 2.0)
    printer.show(3.0, everything=True)
    assert (out.getvalue(), err.getvalue()) == ("", "[0] 100%\n")


def _ranks_of(text: str) -> set[int]:
    first, _, last = text[1 : text.index("]")].partition("-")
    return set(range(int(first), int(last or first) + 1))


def test_output_after_the_end_is_in_the_tabs_a_second_later() -> None:
    messages: list[tuple[str, str]] = []
    sink = CellSink(lambda kind, content: messages.append((kind, str(content))), has_tabs=True)
    printer = Printer((0, 1), sink)
    for rank in (0, 1):
        printer.feed((rank,), Output(1, "stdout", f"same\nof {rank}\n"), 0.0)
    printer.finish(0.0)
    assert [kind for kind, _ in messages] == ["stream", "display_data"]
    assert printer.deadline() is None
    printer.feed((1,), Output(1, "stdout", "late\n"), 10.0)
    printer.show(11.0)
    assert messages[-1][0] == "stream"
    due = printer.deadline()
    assert due == 12.0
    printer.show(due)
    assert messages[-1][0] == "update_display_data"
    assert "late" in messages[-1][1]
    assert printer.deadline() is None


def test_an_animation_is_shown_ten_times_a_second_and_ends_with_its_end() -> None:
    messages: list[tuple[str, str]] = []
    printer = Printer((0,), CellSink(lambda kind, content: messages.append((kind, str(content)))))
    for step in range(1000):
        printer.feed((0,), Display(1, "clear", b"wait"), step / 1000)
        printer.feed((0,), Output(1, "stdout", f"{step}\n"), step / 1000)
        printer.show(step / 1000)
    printer.finish(1.0)
    assert sum(kind == "clear_output" for kind, _ in messages) <= 12
    assert "[0] 999" in messages[-1][1]


# ---- progress bars


def bar(done: float, state: BarState = "open", number: int = 1) -> Bar:
    return Bar(1, number, "train", done, 10.0, 1.0, rate=5.0, state=state)


def kinds_and_heads(shown: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    texts = [
        (kind, content.get("text") or content["data"]["text/plain"]) for kind, content in shown
    ]
    return [(kind, text.partition("\n")[0][:11]) for kind, text in texts]


def test_a_bar_stands_between_what_was_printed_before_and_after_it() -> None:
    shown: list[tuple[str, dict[str, Any]]] = []
    printer = Printer(range(2), CellSink(lambda kind, content: shown.append((kind, content))))
    both = (0, 1)
    printer.feed(both, Output(1, "stdout", "before\n"), 0.0)
    printer.feed(both, bar(0), 0.0)
    printer.feed(both, Output(1, "stdout", "within\n"), 0.0)
    printer.show(0.0)
    printer.feed(both, bar(10, "done"), 1.0)
    printer.feed(both, bar(10, "done", number=2), 1.0)
    printer.show(1.0)
    printer.show(2.0, everything=True)
    assert kinds_and_heads(shown) == [
        ("stream", "[0-1] befor"),
        ("display_data", "[0-1] train"),
        ("stream", "[0-1] withi"),
        ("update_display_data", "[0-1] train"),
        ("display_data", "[0-1] train"),
    ]
    assert "100 %" in shown[3][1]["data"]["text/plain"]
    assert shown[3][1]["transient"] == shown[1][1]["transient"]


def test_bars_stand_in_the_order_in_which_they_began_whichever_rank_was_first(
    out: io.StringIO,
) -> None:
    printer = printer_to(out, 2)
    printer.feed((1,), Output(1, "stdout", "before\n"), 0.0)
    printer.feed((1,), bar(10, "done"), 0.0)
    printer.feed((0,), msgspec.structs.replace(bar(10, "done", number=2), title="second"), 0.01)
    printer.show(1.0, everything=True)
    assert [text.split()[1] for text in out.getvalue().splitlines()] == [
        "before",
        "train",
        "second",
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_bar_stands_between_what_each_of_its_ranks_said_whichever_was_first(
    out: io.StringIO, order: tuple[int, ...]
) -> None:
    printer = printer_to(out, 3)
    for at, rank in enumerate(order):
        printer.feed((rank,), Output(1, "stdout", f"before on {rank}\n"), at / 1000)
        printer.feed((rank,), bar(10, "done"), at / 1000)
        printer.settle((rank,), FAILED if rank == 1 else Done(1), at / 1000)
    printer.show(1.0)
    words = [line.split()[1] for line in out.getvalue().splitlines()]
    assert words == ["before", "before", "before", "train", "Traceback:"]


def test_rank_that_died_before_its_bar_arrived_is_named(out: io.StringIO) -> None:
    printer = printer_to(out, 2)
    printer.settle((1,), Died(1, "was killed by SIGKILL", ""), 0.0)
    printer.feed((1,), bar(3), 0.0)
    printer.show(1.0, everything=True)
    assert "[rank 1 was killed by SIGKILL]" in out.getvalue()


def test_a_bar_that_goes_on_after_the_run_is_redrawn() -> None:
    shown: list[tuple[str, dict[str, Any]]] = []
    printer = Printer((0,), CellSink(lambda kind, content: shown.append((kind, content))))
    printer.feed((0,), bar(3), 0.0)
    printer.show(1.0, everything=True)
    printer.feed((0,), bar(5), 2.0)
    due = printer.deadline()
    assert due is not None
    printer.show(due)
    assert [kind for kind, _ in shown] == ["display_data", "update_display_data"]
    assert "5/10" in shown[-1][1]["data"]["text/plain"]
