"""Questions of ranks: gathered, put to the user, answered, taken back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from cellmesh.controller.run_waiter import RunWaiter
from cellmesh.controller.stdin import GATHER_S, Prompt, Prompts
from cellmesh.errors import RanksInterrupted
from cellmesh.wire.user_code import InputRequest

from ...support.run_cases import WAIT_S, beside, press_stop_once_main_waits_in
from ...support.runs import FakeControl


def ask(request: int = 1, prompt: str = "name? ", is_password: bool = False) -> InputRequest:
    return InputRequest(1, request, prompt, is_password)


def take(prompts: Prompts, ranks: list[int], now: float) -> Prompt:
    """The prompt that is due, which there is."""
    prompt = prompts.take_due(ranks, now)
    assert prompt is not None
    return prompt


# ---- gathering


def test_ranks_that_ask_alike_are_put_together_after_a_moment() -> None:
    prompts = Prompts()
    assert prompts.due_at([0, 1, 2]) is None
    prompts.add([0], ask(4), 10.0)
    prompts.add([2], ask(9), 10.1)
    assert prompts.take_due([0, 1, 2], 10.1) is None
    assert prompts.due_at([0, 1, 2]) == 10.0 + GATHER_S
    prompt = take(prompts, [0, 1, 2], 10.0 + GATHER_S)
    assert prompt.labelled == "[0,2] name? "
    assert prompts.close(prompt, 11.0) == {0: 4, 2: 9}
    assert not prompts.open


def test_if_all_that_run_ask_alike_there_is_no_wait() -> None:
    prompts = Prompts()
    prompts.add([0, 2], ask(), 10.0)
    assert take(prompts, [0, 2], 10.0).requests == {0: 1, 2: 1}


def test_other_questions_wait_their_turn() -> None:
    prompts, seen = Prompts(), []
    prompts.add([1], ask(1, "second? "), 10.05)
    prompts.add([0], ask(1, "first? "), 10.0)
    prompts.add([2], ask(1, "first? ", is_password=True), 10.1)
    for now in (11.0, 12.0, 13.0):
        prompt = take(prompts, [0, 1, 2], now)
        seen.append((prompt.labelled, prompt.is_password))
        prompts.close(prompt, now)
    assert seen == [("[0] first? ", False), ("[1] second? ", False), ("[2] first? ", True)]


def test_answered_rank_may_ask_again_before_other_questions() -> None:
    prompts = Prompts()
    prompts.add([0], ask(1, "(Pdb) "), 10.0)
    first = take(prompts, [0, 1], 10.0 + GATHER_S)
    prompts.add([1], ask(1, "(Pdb) "), 10.0 + GATHER_S)
    prompts.close(first, 20.0)
    assert prompts.take_due([0, 1], 20.0) is None
    prompts.add([0], ask(2, "(Pdb) "), 20.01)
    assert take(prompts, [0, 1], 20.01).labelled == "[0-1] (Pdb) "


def test_withdrawn_question_is_not_answered() -> None:
    prompts = Prompts()
    prompts.add([0, 1], ask(3), 10.0)
    prompt = take(prompts, [0, 1], 10.0)
    prompts.withdraw([0], request=2)  # an older one
    prompts.withdraw([1], request=3)
    assert prompts.waits(prompt)
    assert prompts.close(prompt, 10.0) == {0: 3}
    assert not prompts.waits(prompt)


# ---- the desk


class Keyboard:
    """Stands in for ``input()``; each prompt is answered by the next function."""

    def __init__(self, *answers: Callable[[], str]) -> None:
        self._answers = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._answers.pop(0)()


def sit_before_the_box(asked: threading.Event) -> str:
    """Type nothing. A signal that came just before a wait does not end that, so there are many."""
    asked.set()
    gave_up_at, never = time.monotonic() + WAIT_S, threading.Event()
    while time.monotonic() < gave_up_at:
        never.wait(0.01)
    return "too late"


class Case:
    """Waits for a run, and notes what was done."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.running = list(range(num_ranks))
        self.notes: list[str] = []
        self.noted = threading.Event()
        self.presses: list[threading.Event] = [threading.Event() for _ in range(3)]
        self.num_interrupts = 0
        self.over = threading.Event()
        self.control = FakeControl(condemned_ranks=self.running)
        self.control.on_reply = self.end
        self.waiter = RunWaiter(
            lambda: self.running, self._interrupt, self._note, self._note, "cell 3", self.control
        )

    def _interrupt(self) -> None:
        self.presses[self.num_interrupts].set()
        self.num_interrupts += 1

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()

    def end(self) -> None:
        self.over.set()
        self.waiter._news.report()

    def wait(self) -> bool:
        return self.waiter.wait_until(self.over.is_set, WAIT_S)


def test_the_main_thread_answers_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    case, keyboard = Case(), Keyboard(lambda: "Ada")
    monkeypatch.setattr("builtins.input", keyboard)
    with beside(lambda: case.waiter.add([0, 1], ask(5), 0.0)):
        assert case.wait()
    assert keyboard.prompts == ["[0-1] name? "]
    assert case.control.replies == [({0: 5, 1: 5}, "Ada", False)]


def test_a_thread_that_looks_up_sees_no_question_before_what_was_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, asked = Case(), threading.Event()

    def answer() -> str:
        asked.set()
        return "Ada"

    def show() -> None:  # slowly, while the user's thread is awake
        case.waiter._news.report()
        assert not asked.wait(0.7), "asked before the output was shown"

    monkeypatch.setattr("builtins.input", Keyboard(answer))
    case.running = [0]
    with beside(lambda: case.waiter.add([0], ask(5), 0.0, before=show)):
        assert case.wait()
    assert case.control.replies == [({0: 5}, "Ada", False)]


def test_awaiting_answers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case, keyboard = Case(), Keyboard(lambda: "Ada")
    monkeypatch.setattr("builtins.input", keyboard)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, lambda: case.waiter.add([0, 1], ask(5), 0.0))
        await asyncio.wait_for(case.waiter.await_until(case.over.is_set), WAIT_S)

    asyncio.run(main())
    assert case.control.replies == [({0: 5, 1: 5}, "Ada", False)]


@pytest.mark.parametrize(
    ("error", "text"),
    [(EOFError(), ""), (RuntimeError("no stdin"), "nobody can answer 'name? ' here: no stdin")],
)
def test_no_answer_is_the_end_of_input(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(prompt: str) -> str:
        raise error

    case = Case()
    monkeypatch.setattr("builtins.input", fail)
    case.waiter.add([0, 1], ask(5), 0.0)
    assert case.wait()
    assert case.control.replies == [({0: 5, 1: 5}, text, True)]


@pytest.mark.parametrize("is_pressed", [False, True])
def test_input_box_is_closed_by_the_end_of_the_ranks_and_by_the_stop_button(
    is_pressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, asked = Case(), threading.Event()
    monkeypatch.setattr("builtins.input", Keyboard(lambda: sit_before_the_box(asked)))

    def act() -> None:
        assert asked.wait(WAIT_S)
        if is_pressed:
            os.kill(os.getpid(), signal.SIGINT)
            assert case.presses[0].wait(WAIT_S)
        else:
            case.waiter.withdraw([0, 1])
        case.end()

    case.waiter.add([0, 1], ask(5), 0.0)
    with beside(act):
        assert case.wait()
    assert case.control.replies == []
    assert case.num_interrupts == is_pressed


def test_question_without_a_waiting_caller_is_shown() -> None:
    case = Case()
    case.waiter.add([0, 1], ask(5), 0.0)
    assert case.noted.wait(WAIT_S)
    assert case.notes == [
        "[0-1] name? (asked by cell 3, and nobody waits for it: call `.result()` on the run to "
        "answer)"
    ]
    assert case.waiter.has_questions


# ---- the stop button


def press(case: Case, until: Callable[[], Any]) -> None:
    press_stop_once_main_waits_in("wait_until", lambda: bool(until()), "controller/run_waiter.py")


def test_ranks_that_did_not_stop_are_named_and_a_second_press_interrupts_again() -> None:
    case = Case()

    def act() -> None:
        press(case, lambda: True)
        assert case.noted.wait(WAIT_S)
        press(case, lambda: True)
        assert case.presses[1].wait(WAIT_S)
        case.end()

    with beside(act):
        assert case.wait()
    assert case.notes == [
        "ranks 0-1 did not stop: press again within 5 s to kill and replace what still runs"
    ]
    assert case.num_interrupts == 2


def test_a_third_press_gives_up() -> None:
    case = Case()

    def act() -> None:
        press(case, lambda: True)
        press(case, case.presses[0].is_set)
        press(case, case.presses[1].is_set)

    with (
        beside(act),
        pytest.raises(RanksInterrupted, match="ranks 0-1 did not stop, and will be killed"),
    ):
        case.wait()
    assert case.num_interrupts == 2
