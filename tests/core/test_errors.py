"""The errors, as users catch, read and pickle them."""

from __future__ import annotations

import pickle

import pytest

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


def test_error_types_name_whose_fault_an_error_is() -> None:
    for ours in (MeshUsageError, HostError, ProtocolError, RankDied, RankFailure):
        assert issubclass(ours, CellmeshError)
    assert issubclass(NoMeshError, MeshUsageError)
    assert issubclass(UnpicklableError, (MeshUsageError, TypeError))
    assert not issubclass(RemoteError, CellmeshError)
    assert issubclass(MeshUsageError, ValueError)
    assert issubclass(RanksInterrupted, KeyboardInterrupt)


def test_a_failure_has_exceptions_and_tracebacks_by_rank() -> None:
    caught = failure()
    assert list(caught.exceptions_by_rank) == [0, 1, 3]
    assert type(caught.exceptions_by_rank[1]) is KeyboardInterrupt
    assert caught.tracebacks == {0: "Traceback zero"}
    assert str(caught) == caught.message == "ranks 0,3 raised"
    # A group of exceptions cannot hold what is no Exception.
    assert [type(each) for each in caught.exceptions] == [ValueError, RemoteError, KeyError]


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


def test_a_failure_splits() -> None:
    matching, rest = failure().split(KeyError)
    assert matching is not None
    assert rest is not None
    assert [type(each) for each in matching.exceptions] == [KeyError]
    assert len(rest.exceptions) == 2


def test_texts_of_errors() -> None:
    died = RankDied(3, "killed by SIGKILL", "one\ntwo")
    assert str(died) == "rank 3 killed by SIGKILL; its last lines:\n    one\n    two"
    assert (
        str(RemoteError("OddError", "odd", "it holds a lock")) == "OddError: odd (it holds a lock)"
    )
    assert errors.did_you_mean("backed", ["backend", "mesh"]) == "; did you mean 'backend'?"
    assert errors.did_you_mean("zzz", ["backend", "mesh"]) == ""


def test_a_failure_pickles() -> None:
    caught = pickle.loads(pickle.dumps(failure()))
    assert type(caught) is RankFailure
    assert str(caught) == "ranks 0,3 raised"
    assert list(caught.exceptions_by_rank) == [0, 1, 3]
    assert caught.exceptions_by_rank[0].args == ("zero",)
    assert type(caught.exceptions_by_rank[1]) is KeyboardInterrupt
    assert caught.tracebacks == {0: "Traceback zero"}
    assert len(caught.exceptions) == 3


@pytest.mark.parametrize(
    "error",
    [
        RankDied(3, "killed", "last"),
        RemoteError("OddError", "odd", "why"),
        UnpicklableError("no"),
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
