"""Questions to ranks' control threads: answered by all, or as far as they will be."""

from __future__ import annotations

from typing import Any

from cellmesh.controller.core.core import Answer, Effect
from cellmesh.controller.core.requests import ANSWER_S, Questions
from cellmesh.wire.status import Probe

from ....support.core_decisions import control_sent


def asked(
    questions: Questions, ranks: tuple[int, ...], now: float = 0.0
) -> tuple[int, list[Effect]]:
    request = questions.new_request()
    effects = questions.ask(
        ranks, Probe, now, lambda answers, now: [Answer(request, answers)], request
    )
    return request, effects


def test_a_question_goes_to_all_its_ranks_and_is_answered_when_all_have_answered() -> None:
    questions = Questions()
    request, effects = asked(questions, (1, 0))
    assert control_sent(effects) == [((0, 1), Probe(request))]
    assert questions.answer(request, (1,), "b", 0.1) == []
    assert questions.answer(request, (0,), "a", 0.2) == [Answer(request, {0: "a", 1: "b"})]
    assert questions.answer(request, (0,), "a", 0.3) == []
    request, effects = asked(questions, ())
    assert effects == [Answer(request, {})]
    assert questions.deadline() is None


def test_rank_without_an_answer_in_time_is_left_out() -> None:
    questions = Questions()
    (first, _), (second, _) = asked(questions, (0, 1), 5.0), asked(questions, (0,), 6.0)
    questions.answer(first, (1,), "b", 5.1)
    assert questions.deadline() == 5.0 + ANSWER_S
    assert questions.tick(5.0 + ANSWER_S / 2) == []
    assert questions.tick(5.0 + ANSWER_S) == [Answer(first, {1: "b"})]
    assert questions.deadline() == 6.0 + ANSWER_S
    assert questions.answer(first, (0,), "a", 6.1) == []
    assert questions.answer(second, (0,), "a", 6.5) == [Answer(second, {0: "a"})]


def test_question_does_not_wait_for_a_dead_rank() -> None:
    questions = Questions()
    (first, _), (second, _) = asked(questions, (0, 1)), asked(questions, (0,))
    questions.answer(first, (1,), "b", 0.1)
    assert questions.forget_rank(0, 0.2) == [Answer(first, {1: "b"}), Answer(second, {})]


def test_an_answer_may_lead_to_another_question() -> None:
    questions = Questions()

    def again(answers: dict[int, Any], now: float) -> list[Effect]:
        return questions.ask((0,), Probe, now, lambda answers, now: [Answer(99, answers)])

    questions.ask((0,), Probe, 0.0, again)
    [(ranks, probe)] = control_sent(questions.tick(ANSWER_S))
    assert ranks == (0,)
    assert questions.close_all(2.0) == [Answer(99, {})]
    assert questions.answer(probe.request, (0,), "a", 3.0) == []
