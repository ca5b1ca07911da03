"""The actors of a rank: objects that the notebook has made by `Ranks.spawn`, and calls of their
methods, which are executed in the order in which they arrive.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import MeshUsageError, RankDied
from ...wire.nests import split_rows
from .imports import load
from .value_transfer import bind_again, find_missing_names

if TYPE_CHECKING:
    import asyncio

    from .actor_states import States


@dataclass
class _Stream:
    """A generator; of an asynchronous one, also whose turn it is, and the tasks that have to end
    before it is closed; of one whose values another rank reads, the connection to that rank, and
    the call that ends it (`Handles`).
    """

    values: Any = None
    turn: asyncio.Lock | None = None
    tasks: set[Any] = field(default_factory=set)
    has_ended: bool = False
    reader: Any = None
    end: Any = None


class Actors:
    """The actors of one rank, by name; each public method is an operation of `RunCall`.

    Operations take the names of the actor and of the method, for descriptions, and further
    arguments of their own.

    Args:
        namespace: namespace of the rank, in which each actor is a variable of its name.
        rank: the rank.

    Attributes:
        streams: generators that are open, by the readers' numbers.
    """

    def __init__(self, namespace: dict[str, Any], rank: int) -> None:
        self._namespace, self._rank = namespace, rank
        self._objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by id of the object
        self.on_made: Callable[[], None] = lambda: None
        self.serve: Callable[..., Any]  # operation of another rank's call (`Handles.serve`)
        self._missing: dict[str, list[tuple[dict[str, Any], dict[str, str]]]] = {}
        self._states: dict[str, States] = {}
        self.streams: dict[int, _Stream] = {}

    def find(self, operation: str, target: tuple[Any, ...]) -> tuple[str, Callable[..., Any]]:
        """Return the name of a call for users, and the function that it calls.

        Args:
            operation: name of the operation.
            target: name of the actor, name of its method, and arguments of the operation.
        """
        title = f"{target[0]}.{target[1]}" if operation != "taken_by" else ""
        if operation == "call":
            function = self._method(*target)
        else:
            function = functools.partial(getattr(self, operation), *target)
        if self._states and operation in ("call", "send", "shard") and target[0] in self._states:
            function = self._states[target[0]].counted(function, self._objects[target[0]])
        return title, function

    def get(self, name: str) -> Any:
        """Return an actor's object; None if there is none."""
        return self._objects.get(name)

    def name_of(self, value: object) -> str:
        """Return the name of the actor that a value is; "" if it is none."""
        name = self._names.get(id(value), "")
        return name if name and self._objects.get(name) is value else ""

    def taken_by(self, name: str, _: str, /) -> str:
        """Return the class of the variable of an actor's name; "" if it is the actor, or none."""
        value = self._namespace.get(name, self)
        is_free = value is self or value is self._objects.get(name, self)
        return "" if is_free else type(value).__qualname__

    def make(
        self, name: str, _: str, kind: type, saved: Any = (), /, *args: Any, **kwargs: Any
    ) -> bool:
        """Make an object, and bind it to its name in the namespace.

        Args:
            name: its name.
            kind: its class.
            saved: for states to be saved: number of calls after which, the mesh's directory, and
                whether the object gets the state that the rank before has saved; else empty.
            args, kwargs: arguments of the class.

        Returns:
            Whether it has such a state, not that of its constructor.
        """
        self._missing[name] = find_missing_names((kind,), self._namespace.get("mesh"))
        bind_again(self._missing[name], self._namespace)
        self._states.pop(name, None)
        made = None
        if saved:
            every, directory, is_again = saved
            states = load("rank.actor_states").States(name, self._rank, every, directory)
            made = states.restore(kind) if is_again else states.forget()
            self._states[name] = states
        is_restored = made is not None
        made = made if is_restored else kind(*args, **kwargs)
        self._objects[name] = self._namespace[name] = made
        self._names[id(made)] = name
        self.on_made()
        return is_restored

    def drop(self, name: str, _: str, /) -> None:
        """Forget an actor, and remove its variable unless user code has bound that to another
        object.
        """
        if (states := self._states.pop(name, None)) is not None:
            states.forget()
        dropped = self._objects.pop(name, None)
        self._names.pop(id(dropped), None)
        if dropped is not None and self._namespace.get(name) is dropped:
            del self._namespace[name]

    def redefine(self, name: str, _: str, kind: type, /) -> None:
        """Give an actor another class; its state stays."""
        self._find(name).__class__ = kind
        self._missing[name] = find_missing_names((kind,), self._namespace.get("mesh"))
        bind_again(self._missing[name], self._namespace)

    def send(self, name: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return no value."""
        value = self._method(name, method)(*args, **kwargs)
        return _without_value(value) if inspect.isawaitable(value) else None

    def shard(
        self, name: str, method: str, index_of: dict[int, int], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method with one part of the tensors in the arguments: that of this rank's index,
        which other ranks may have, too.
        """
        num_parts = max(index_of.values()) + 1
        args, kwargs = split_rows((args, kwargs), index_of[self._rank], num_parts)
        return self._method(name, method)(*args, **kwargs)

    # ---- streams

    def begin_stream(
        self, name: str, method: str, number: int, /, *args: Any, **kwargs: Any
    ) -> None:
        """Begin a stream of what a method yields.

        Raises:
            MeshUsageError: the method returns neither a generator nor an iterator.
        """
        stream = self.streams[number] = _Stream(has_ended=True)
        values = self._method(name, method)(*args, **kwargs)
        if isinstance(values, AsyncIterator):
            import asyncio

            stream.turn = asyncio.Lock()
        elif not isinstance(values, Iterator):
            raise MeshUsageError(
                f"{name}.{method} returns a {type(values).__name__} and yields no values: call "
                f"{name}.{method}(...)"
            )
        stream.values, stream.has_ended = values, False

    def advance(self, name: str, method: str, number: int, /) -> Any:
        """Return the next value of a stream in a tuple; () if it has ended, as values are requested
        ahead.

        Raises:
            RankDied: it has begun on the rank that this one has replaced.
        """
        if (stream := self.streams.get(number)) is None:
            raise RankDied(self._rank, f"was replaced, and no longer streams {name}.{method}")
        if stream.turn is not None:
            return self._advance_async(stream, stream.turn)
        try:
            return () if stream.has_ended else (next(stream.values),)
        except BaseException as error:
            stream.has_ended = True
            if isinstance(error, StopIteration):
                return ()
            raise

    async def _advance_async(self, stream: _Stream, turn: asyncio.Lock) -> Any:
        import asyncio

        stream.tasks.add(task := asyncio.current_task())
        try:
            async with turn:
                return () if stream.has_ended else (await anext(stream.values),)
        except asyncio.CancelledError:
            if not stream.has_ended:
                raise  # by the user, who then ends the stream
            return ()
        except BaseException as error:
            stream.has_ended = True
            if isinstance(error, StopAsyncIteration):
                return ()
            raise
        finally:
            stream.tasks.discard(task)

    def end_stream(self, _: str, __: str, number: int, /) -> Any:
        """End a stream, and close its generator, also as it waits."""
        stream = self.streams.pop(number, _Stream())
        stream.has_ended = True
        for task in stream.tasks:
            task.cancel()
        if stream.turn is not None:
            return self._end_async(stream.values, stream.turn)
        if hasattr(stream.values, "close"):
            stream.values.close()
        return None

    async def _end_async(self, values: Any, turn: asyncio.Lock) -> None:
        async with turn:
            if hasattr(values, "aclose"):
                await values.aclose()

    # ---- inside

    def _find(self, name: str) -> Any:
        if name not in self._objects:
            raise MeshUsageError(f"this rank has no actor {name!r}: mesh.spawn it again")
        return self._objects[name]

    def _method(self, name: str, method: str, /) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._find(name), method)
        bind_again(self._missing[name], self._namespace)
        return found


async def _without_value(value: Any) -> None:
    await value
