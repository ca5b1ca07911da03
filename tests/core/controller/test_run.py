"""A run's outcome as it comes: values, output, failures."""

from __future__ import annotations

import pickle

import pytest

from cellmesh.errors import MeshUsageError, RankDied, RankFailure, RanksInterrupted, RemoteError
from cellmesh.wire import payload
from cellmesh.wire.messages import Done, Failed, Pickled
from cellmesh.wire.status import RankState
from cellmesh.wire.user_code import Output

from ...support.run_cases import Case

# ---- values


def failure_of(case: Case) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        case.run.result(0)
    return caught.value


def test_a_run_without_values_gives_none() -> None:
    case = Case()
    case.settle((0, 1), Done(1))
    assert case.run.result(0) == {0: None, 1: None}


def test_a_single_ranks_result_is_its_value_loaded_once() -> None:
    case = Case(1, single=True)
    case.give(0, [42])
    assert case.run.result(0) == [42]
    assert case.run.result(0) is case.run.result(0)


def test_ranks_that_answer_alike_have_values_of_their_own() -> None:
    case = Case(2)
    pickled, _ = payload.dumps([1], "value")
    case.settle((0, 1), Done(1, pickled))
    first, second = case.run.result(0).list
    assert first == second == [1]
    assert first is not second


def test_results_are_in_the_order_of_ranks_and_show_and_pickle_as_such() -> None:
    case = Case((2, 0))
    for rank in (2, 0):
        case.give(rank, rank)
    results = pickle.loads(pickle.dumps(case.run.result(0)))
    assert repr(results) == "Results({0: 0, 2: 2})"
    assert results.list == [0, 2]
    assert results.get(3) is None
    with pytest.raises(KeyError, match=r"no result of rank 3: there are results of \[0, 2\]"):
        results[3]


def test_unloadable_value_is_reported_with_its_rank() -> None:
    case = Case(1)
    case.settle((0,), Done(1, Pickled(b"cno_such_module\nThing\n.")))
    with pytest.raises(MeshUsageError, match=r"value of rank 0 cannot be loaded .*ModuleNotFound"):
        case.run.result(0)


# ---- output


def test_output_is_shown_before_the_run_is_done() -> None:
    case = Case(1)
    case.run.printer.feed((0,), Output(1, "stdout", "last words"), 0.0)
    seen: list[str] = []
    case.run.on_end(lambda: seen.append(case.sink.text))
    case.settle((0,), Done(1))
    assert seen == ["[0] last words\n"]


def test_exception_is_shown_on_arrival() -> None:
    case = Case(2)
    case.fail(1, ValueError("no"))
    case.run.printer.show(1.0)
    assert case.sink.text == "[1] Traceback ValueError\n"


# ---- failures


def test_a_failure_has_the_original_exceptions_by_rank() -> None:
    case = Case(3)
    case.fail(2, KeyError("key"), line=0)
    case.fail(0, ValueError("no\nand more"), line=4)
    case.settle((1,), Done(1))
    failure = failure_of(case)
    assert list(failure.exceptions_by_rank) == [0, 2]
    assert type(failure.exceptions_by_rank[0]) is ValueError
    assert failure.exceptions_by_rank[2].args == ("key",)
    assert failure.tracebacks == {0: "Traceback ValueError", 2: "Traceback KeyError"}
    assert str(failure) == (
        "rank 0 raised ValueError: no (line 4); rank 2 raised KeyError: 'key'; rank 1 finished"
    )


def test_a_death_is_a_failure_with_its_reason_and_last_words() -> None:
    case = Case(2)
    case.settle((0,), Done(1))
    case.die(1)
    failure = failure_of(case)
    assert str(failure) == "rank 1 killed by SIGKILL; rank 0 finished"
    died = failure.exceptions_by_rank[1]
    assert isinstance(died, RankDied)
    assert (died.rank, died.reason, died.last_output) == (1, "killed by SIGKILL", "last words")
    assert failure.tracebacks == {}


def test_an_exception_that_did_not_travel_is_stood_in_for() -> None:
    case = Case(1)
    case.settle((0,), Failed(1, "OddError", "odd", "Traceback", 2, None, "it holds a lock"))
    failure = failure_of(case)
    assert "rank 0 raised OddError: odd" in str(failure)
    stand_in = failure.exceptions_by_rank[0]
    assert isinstance(stand_in, RemoteError)
    facts = (stand_in.type_name, stand_in.text, stand_in.why)
    assert facts == ("OddError", "odd", "it holds a lock")


@pytest.mark.parametrize(
    "stream",
    [b"cno_such_module\nThing\n.", b"not a pickle", b"N."],
    ids=["import", "junk", "no exception"],
)
def test_an_exception_that_does_not_load_is_stood_in_for(stream: bytes) -> None:
    case = Case(1)
    case.settle((0,), Failed(1, "OddError", "odd", "Traceback", 2, Pickled(stream)))
    assert isinstance(failure_of(case).exceptions_by_rank[0], RemoteError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_system_exit_on_a_rank_does_not_end_the_notebook(error: BaseException) -> None:
    case = Case(1)
    case.fail(0, error)
    assert type(failure_of(case).exceptions_by_rank[0]) is type(error)


def test_after_an_interrupt_a_stopped_run_is_an_interrupt() -> None:
    case = Case(2)
    case.run.interrupt()
    assert case.interrupted.is_set()
    case.fail(0, KeyboardInterrupt("interrupted in all_reduce"), line=5)
    case.settle((1,), Done(1))
    with pytest.raises(RanksInterrupted, match="KeyboardInterrupt: interrupted in all_reduce"):
        case.run.result(0)


def test_interrupt_after_the_end_is_no_failure() -> None:
    case = Case(1)
    case.run.interrupt()
    case.give(0, 1)
    assert case.run.result(0) == {0: 1}


def test_exception_raised_after_an_interrupt_is_a_failure() -> None:
    case = Case(1)
    case.run.interrupt()
    case.fail(0, ValueError("no"))
    assert failure_of(case)


# ---- where the others are


def test_waiting_ranks_and_their_places_are_shown() -> None:
    case = Case(4)
    case.fail(3, ValueError("no"))
    waits, runs = (RankState(1, 1, 3, 5, "m.f", name, "cpu", 0) for name in ("all_reduce", ""))
    case.run.report_waiting({0: waits, 2: waits, 1: runs})
    words = "rank 3 has ended; ranks 0,2 in all_reduce at line 5; rank 1 running m.f at line 5. "
    assert f"{words}The stop button" in case.sink.text
