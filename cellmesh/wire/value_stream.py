"""The values that a method of an actor yields, as its reader has them: the notebook, or a rank."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

from ..errors import MeshUsageError
from .ranks import Results


class Start(Protocol):
    """Starts an operation of the stream on the actor's ranks (`workers.rank.actors.Actors`)."""

    def __call__(self, operation: str, args: Any = (), kwargs: Any = None) -> Answer: ...


class Answer(Awaitable[Any], Protocol):
    """An operation in flight."""

    def result(self) -> Any: ...


class ValueStream(Iterator[Any], AsyncIterator[Any]):
    """The values that a method yields on an actor's ranks, for a loop; made by `Method.stream`.

    Args:
        start: starts an operation.
        end: starts the last operation, which closes the generator; returns without waiting.
        ahead: how many more values than are read a rank may make.
        args, kwargs: arguments of the method.

    Raises:
        MeshUsageError: `ahead` is less than 1.
    """

    def __init__(
        self, start: Start, end: Callable[[], object], ahead: int, args: Any, kwargs: Any
    ) -> None:
        if ahead < 1:
            raise MeshUsageError(f"ahead={ahead}: a stream is at least 1 value ahead")
        self._start, self._end = start, end
        self._runs = collections.deque[Answer]()  # each makes a value
        self._opening: Answer | None = start("begin_stream", args, kwargs)
        self._is_open = True
        while len(self._runs) < ahead:
            self._runs.append(start("advance"))

    def __next__(self) -> Any:
        if not self._runs:
            raise StopIteration
        try:
            if self._opening is not None:
                self._opening.result()
            values = self._take(self._runs[0].result())
        except BaseException:
            self.close()
            raise
        if not values:
            raise StopIteration
        return values[0]

    async def __anext__(self) -> Any:
        if not self._runs:
            raise StopAsyncIteration
        try:
            if self._opening is not None:
                await self._opening
            values = self._take(await self._runs[0])
        except BaseException:
            self.close()
            raise
        if not values:
            raise StopAsyncIteration
        return values[0]

    def _take(self, found: Any) -> tuple[Any, ...]:
        """Return the next value in a tuple, and request one more; () at the end."""
        self._opening = None
        self._runs.popleft()
        if isinstance(found, Results):
            values = Results({rank: value[0] for rank, value in found.items() if value})
            found = (values,) if values else ()
        if found:
            self._runs.append(self._start("advance"))
        else:
            self.close()
        return found  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the stream, and close its generator on the ranks; return without waiting."""
        self._runs.clear()
        is_open, self._is_open = self._is_open, False
        if is_open:
            self._end()

    def __del__(self) -> None:
        if hasattr(self, "_is_open"):
            self.close()
