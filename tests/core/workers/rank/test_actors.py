"""Streams of what methods yield, between a reader and the actors of ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from cellmesh.errors import MeshUsageError, RankDied
from cellmesh.wire.ranks import Results
from cellmesh.wire.value_stream import ValueStream
from cellmesh.workers.rank.actors import Actors


class Maker:
    """What is streamed."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def values(self, num: int, *, fails_at: int = -1) -> Iterator[int]:
        try:
            for number in range(num):
                if number == fails_at:
                    raise KeyError(number)
                self.log.append(number)
                yield number
        finally:
            self.log.append("closed")

    def number(self) -> int:
        return 3


def make_rank(rank: int = 0) -> Actors:
    actors = Actors({}, rank)
    actors.make("maker", "", Maker)
    return actors


def log_of(actors: Actors) -> list[Any]:
    return actors.get("maker").log  # type: ignore[no-any-return]


@pytest.fixture
def ranks() -> dict[int, Actors]:
    """A rank with an actor; tests add others."""
    return {0: make_rank()}


@pytest.fixture
def stream(ranks: dict[int, Actors]) -> Callable[..., ValueStream]:
    """Streams what a method of the ranks' actors yields; each operation is executed at once."""

    def start(method: str, *args: Any, ahead: int = 2, **kwargs: Any) -> ValueStream:
        def execute(actors: Actors, operation: str, args: Any, kwargs: Any) -> Any:
            return actors.find(operation, ("maker", method, 7))[1](*args, **kwargs)

        def run(operation: str, args: Any = (), kwargs: Any = None) -> Any:
            run: Future[Any] = Future()
            try:
                values = {
                    rank: execute(actors, operation, args, kwargs or {})
                    for rank, actors in ranks.items()
                }
            except Exception as error:
                run.set_exception(error)
            else:
                run.set_result(Results(values) if len(values) > 1 else values[0])
            return run

        return ValueStream(run, lambda: run("end_stream"), ahead, args, kwargs)

    return start


def test_no_more_values_are_made_than_asked_for_and_a_generator_is_closed(
    ranks: dict[int, Actors], stream: Callable[..., ValueStream]
) -> None:
    for value in stream("values", 10):
        if value == 1:
            break
    assert log_of(ranks[0]) == [0, 1, 2, 3, "closed"]
    assert ranks[0].streams == {}


def test_a_stream_ends_with_all_of_its_generators(
    ranks: dict[int, Actors], stream: Callable[..., ValueStream]
) -> None:
    ranks[1] = make_rank(1)
    found = [*stream("values", 3, ahead=5)]
    assert [each.list for each in found] == [[number] * 2 for number in range(3)]
    assert [each.streams for each in ranks.values()] == [{}, {}]


def test_a_failure_is_raised_after_the_values_before_it(
    ranks: dict[int, Actors], stream: Callable[..., ValueStream]
) -> None:
    values = stream("values", 5, fails_at=2, ahead=4)
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(KeyError):
        next(values)
    assert [*values] == []
    assert ranks[0].streams == {}
    with pytest.raises(MeshUsageError, match=r"maker.number returns a int and yields no values"):
        next(stream("number"))
    with pytest.raises(MeshUsageError, match="at least 1 value ahead"):
        stream("values", 1, ahead=0)


def test_a_replaced_rank_ends_no_stream_as_if_it_were_complete(
    ranks: dict[int, Actors], stream: Callable[..., ValueStream]
) -> None:
    values = stream("values", 10)
    assert next(values) == 0
    ranks[0] = make_rank()
    assert [next(values), next(values)] == [1, 2]  # made by the former one
    with pytest.raises(RankDied, match="rank 0 was replaced, and no longer streams"):
        next(values)
