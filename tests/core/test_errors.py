"""The errors, as users catch, read and pickle them."""

from __future__ import annotations

import copy
import pickle

import pytest

import cellmesh as cm
from cellmesh import errors
from cellmesh.errors import (
    CellmeshError,
    HostError,
    MeshUsageError,
    NoMeshError,
    ProtocolError,
    RankDied,
    RankFailure,
    RanksInterrupted,
    RemoteError,
    UnpicklableError,
)


def failure() -> RankFailure:
    return RankFailure(
        "ranks 0,3 raised",
        {3: KeyError("three"), 0: ValueError("zero"), 1: KeyboardInterrupt("one")},
        {0: "Traceback zero"},
    )


# ---- the tree


def test_error_types_name_whose_fault_an_error_is() -> None:
    for ours in (MeshUsageError, HostError, ProtocolError, RankDied, RankFailure):
        assert issubclass(ours, CellmeshError)
    assert issubclass(NoMeshError, MeshUsageError)
    assert issubclass(UnpicklableError, MeshUsageError)
    assert not issubclass(RemoteError, CellmeshError)


def test_errors_are_also_what_python_calls_such_errors() -> None:
    assert issubclass(MeshUsageError, ValueError)
    assert issubclass(UnpicklableError, TypeError)
    assert issubclass(RankFailure, ExceptionGroup)
    assert issubclass(RanksInterrupted, KeyboardInterrupt)
    assert not issubclass(RanksInterrupted, Exception)


def test_the_public_ones_are_those_of_the_package() -> None:
    assert cm.CellmeshError is CellmeshError
    assert cm.RankFailure is RankFailure
    assert cm.RankDied is RankDied


def test_the_docstring_draws_every_error() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert errors.__doc__ is not None
    assert {name for name in defined if name not in errors.__doc__} == set()


# ---- the failure of ranks


def test_a_failure_has_exceptions_and_tracebacks_by_rank() -> None:
    caught = failure()
    assert list(caught.exceptions_by_rank) == [0, 1, 3]
    assert type(caught.exceptions_by_rank[1]) is KeyboardInterrupt
    assert caught.tracebacks == {0: "Traceback zero"}
    assert str(caught) == caught.message == "ranks 0,3 raised"


def test_the_group_holds_the_original_exceptions_in_the_order_of_ranks() -> None:
    zero, one, three = failure().exceptions
    assert (type(zero), zero.args) == (ValueError, ("zero",))
    assert (type(three), three.args) == (KeyError, ("three",))
    # A group of exceptions cannot hold what is no Exception.
    assert isinstance(one, RemoteError)
    assert (one.type_name, one.text) == ("KeyboardInterrupt", "one")


def test_except_star_finds_the_ranks_own_exceptions() -> None:
    found: list[str] = []
    try:
        raise failure()
    except* ValueError as group:
        found += [str(exc) for exc in group.exceptions]
    except* KeyError as group:
        found += [str(exc) for exc in group.exceptions]
    except* RemoteError as group:
        found += [exc.type_name for exc in group.exceptions]
    assert found == ["zero", "'three'", "KeyboardInterrupt"]


def test_except_star_passes_on_unhandled_exceptions() -> None:
    def handle_one_kind() -> None:
        try:
            raise failure()
        except* ValueError:
            pass

    with pytest.raises(ExceptionGroup) as caught:
        handle_one_kind()
    assert caught.group_contains(KeyError)
    assert not caught.group_contains(ValueError)


def test_rank_failure_can_be_caught_as_one_exception() -> None:
    with pytest.raises(CellmeshError):
        raise failure()


def test_a_failure_splits() -> None:
    matching, rest = failure().split(KeyError)
    assert matching is not None
    assert rest is not None
    assert [type(exc) for exc in matching.exceptions] == [KeyError]
    assert len(rest.exceptions) == 2


@pytest.mark.parametrize(
    "duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"]
)
def test_a_failure_pickles(duplicate: object) -> None:
    caught = duplicate(failure())  # type: ignore[operator]
    assert type(caught) is RankFailure
    assert str(caught) == "ranks 0,3 raised"
    assert list(caught.exceptions_by_rank) == [0, 1, 3]
    assert caught.exceptions_by_rank[0].args == ("zero",)
    assert type(caught.exceptions_by_rank[1]) is KeyboardInterrupt
    assert caught.tracebacks == {0: "Traceback zero"}
    assert len(caught.exceptions) == 3


def test_failure_does_not_change_with_its_source() -> None:
    by_rank: dict[int, BaseException] = {0: ValueError("no")}
    caught = RankFailure("failed", by_rank)
    by_rank.clear()
    assert list(caught.exceptions_by_rank) == [0]


def test_a_failure_may_be_made_with_keywords() -> None:
    caught = RankFailure("failed", {0: ValueError("no")}, tracebacks={0: "Traceback"})
    assert caught.tracebacks == {0: "Traceback"}


# ---- the others


def test_a_death_says_how_and_quotes_the_last_lines() -> None:
    died = RankDied(3, "killed by SIGKILL", "one\ntwo")
    assert str(died) == "rank 3 killed by SIGKILL; its last lines:\n    one\n    two"
    assert str(RankDied(3, "exited with code 3")) == "rank 3 exited with code 3"


def test_stand_in_names_the_value_it_replaces() -> None:
    assert str(RemoteError("OddError", "odd")) == "OddError: odd"
    assert (
        str(RemoteError("OddError", "odd", "it holds a lock")) == "OddError: odd (it holds a lock)"
    )


@pytest.mark.parametrize(
    "error",
    [
        RankDied(3, "killed", "last"),
        RemoteError("OddError", "odd", "why"),
        MeshUsageError("no"),
        NoMeshError("no"),
        UnpicklableError("no"),
        HostError("no"),
        ProtocolError("no"),
        RanksInterrupted("stopped"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_pickles(error: BaseException) -> None:
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is type(error)
    assert str(loaded) == str(error)
    assert vars(loaded) == vars(error)


@pytest.mark.parametrize(
    "error", [MeshUsageError("no mesh"), failure(), RanksInterrupted("stopped")], ids=repr
)
def test_a_notebook_shows_the_message_without_our_frames(error: BaseException) -> None:
    assert error._render_traceback_() == [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]


def test_the_nearest_word_is_suggested() -> None:
    assert errors.did_you_mean("backed", ["backend", "mesh"]) == "; did you mean 'backend'?"
    assert errors.did_you_mean("zzz", ["backend", "mesh"]) == ""
