"""Questions of ranks: gathered, put to the user, answered, taken back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from cellmesh.controller.stdin import GATHER_S, Prompt, Questions
from cellmesh.wire.messages import Done
from cellmesh.wire.verbs import InputRequest

from ...support.run_cases import WAIT_S, Case, beside


def ask(request: int = 1, prompt: str = "name? ", is_password: bool = False) -> InputRequest:
    return InputRequest(1, request, prompt, is_password)


ALL = range(3)


def asked(*requests: tuple[list[int], InputRequest, float]) -> Questions:
    questions = Questions()
    for ranks, request, now in requests:
        questions.add(ranks, request, now, ALL)
    return questions


def take(questions: Questions, ranks: Sequence[int], now: float) -> Prompt:
    prompt, _ = questions.take_due(ranks, now)
    assert prompt is not None
    return prompt


# ---- gathering


def test_ranks_that_ask_alike_are_put_together_after_a_moment() -> None:
    assert Questions().take_due(ALL, 0.0) == (None, None)
    questions = asked(([0], ask(4), 10.0), ([2], ask(9), 10.1))
    assert questions.take_due(ALL, 10.1) == (None, 10.0 + GATHER_S)
    prompt = take(questions, ALL, 10.0 + GATHER_S)
    assert prompt.labelled == "[0,2] name? "
    assert questions.close(prompt, 11.0) == {0: 4, 2: 9}
    assert not questions.open
    # If all that run ask alike, there is no wait.
    assert take(asked(([0, 2], ask(), 10.0)), [0, 2], 10.0).requests == {0: 1, 2: 1}


def test_other_questions_wait_their_turn() -> None:
    second, first = ask(1, "second? "), ask(1, "first? ")
    hidden = ask(1, "first? ", is_password=True)
    questions, seen = asked(([1], second, 10.05), ([0], first, 10.0), ([2], hidden, 10.1)), []
    for now in (11.0, 12.0, 13.0):
        prompt = take(questions, ALL, now)
        seen.append((prompt.labelled, prompt.is_password))
        questions.close(prompt, now)
    assert seen == [("[0] first? ", False), ("[1] second? ", False), ("[2] first? ", True)]


def test_withdrawn_question_is_not_answered() -> None:
    questions = asked(([0, 1], ask(3), 10.0))
    prompt = take(questions, [0, 1], 10.0)
    questions.withdraw([0], request=2)  # an older one
    questions.withdraw([1], request=3)
    assert questions.close(prompt, 10.0) == {0: 3}
    assert questions.close(prompt, 10.0) == {}


# ---- put to the user


def sit_before_the_box(asked: threading.Event) -> str:
    """Type nothing. A signal that came just before a wait does not end that, so there are many."""
    asked.set()
    gave_up_at, never = time.monotonic() + WAIT_S, threading.Event()
    while time.monotonic() < gave_up_at:
        never.wait(0.01)
    return "too late"


def case_that_ends_by_an_answer() -> Case:
    case = Case(2, title="cell 3")
    case.control.on_reply = lambda: case.settle((0, 1), Done(1))
    return case


def test_no_question_is_put_before_printed_text(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = case_that_ends_by_an_answer(), threading.Event()
    show, prompts = case.run.printer.show, list[str]()

    def show_slowly(now: float, everything: bool = False) -> None:
        monkeypatch.setattr(case.run.printer, "show", show)
        case.run._news.report()  # the user's thread is awake
        assert not asked.wait(0.7), "asked before the output was shown"

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        asked.set()
        return "Ada"

    monkeypatch.setattr(case.run.printer, "show", show_slowly)
    monkeypatch.setattr("builtins.input", answer)
    with beside(lambda: case.run.ask((0, 1), ask(5), 0.0)):
        case.run.result(WAIT_S)
    assert prompts == ["[0-1] name? "]
    assert case.control.replies == [({0: 5, 1: 5}, "Ada", False)]


@pytest.mark.parametrize(
    ("error", "text"),
    [(EOFError(), ""), (RuntimeError("no stdin"), "nobody can answer 'name? ' here: no stdin")],
)
def test_no_answer_is_the_end_of_input_also_for_an_awaited_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(prompt: str) -> str:
        raise error

    async def wait() -> None:
        async with asyncio.timeout(WAIT_S):
            await case.run

    case = case_that_ends_by_an_answer()
    monkeypatch.setattr("builtins.input", fail)
    case.run.ask((0, 1), ask(5), 0.0)
    asyncio.run(wait())
    assert case.control.replies == [({0: 5, 1: 5}, text, True)]


@pytest.mark.parametrize("is_pressed", [False, True])
def test_input_box_is_closed_by_the_end_of_the_ranks_and_by_the_stop_button(
    is_pressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, asked = Case(2), threading.Event()
    monkeypatch.setattr("builtins.input", lambda prompt: sit_before_the_box(asked))

    def act() -> None:
        assert asked.wait(WAIT_S)
        if is_pressed:
            os.kill(os.getpid(), signal.SIGINT)
            assert case.interrupted.wait(WAIT_S)
        case.settle((0, 1), Done(1))

    case.run.ask((0, 1), ask(5), 0.0)
    with beside(act):
        case.run.result(WAIT_S)
    assert case.control.replies == []
    assert case.num_interrupts == is_pressed
