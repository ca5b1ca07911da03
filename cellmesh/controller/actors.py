"""Actors: objects on ranks that the notebook makes by `Ranks.spawn`, and whose methods it calls
through a handle.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import itertools
import keyword
import pickle
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CellmeshError, MeshUsageError, RankDied
from ..wire.codec import Frame
from ..wire.handles import Address, find_method, methods_of
from ..wire.handles import NoMethodError as NoMethodError
from ..wire.messages import Died, Pickled, Respawned
from ..wire.nests import check_rows, indices_in, join_parts
from ..wire.payload import is_short
from ..wire.ranks import choose_ranks, describe_ranks, with_verb
from ..wire.value_stream import ValueStream
from ..wire.verbs import RunCall
from .actor_records import forget, keep, read_all
from .arguments import is_async
from .core.effects import Change
from .core.mesh_state import HostLost, Returned
from .failure_summary import refuse_dead
from .output.calling_cell import current_sink
from .output.console import Sink
from .rank_set import RankSet, dump_call
from .run import Run

_numbers = itertools.count()  # of streams


@dataclass(eq=False)
class Spawned:
    """An actor, as the notebook that has made it knows it.

    Attributes:
        name: its name, the ranks' variable.
        kind: its class.
        rank_set: the ranks that have it.
        args, kwargs: arguments of its constructor.
        lost: ranks that have it no longer, as they have died or were replaced.
        num_calls: for each rank, its calls by ``.any`` in flight, and all that it has had.
        why_ended: why there is no such actor any more; "" while there is.
        lock: of `num_calls`.
        on_death: as in `Ranks.spawn`.
        restarted_at: when it was made again on ranks that have replaced dead ones.
        restarter: the thread that does so now, which may already call it; 0 for none.
        number: its place in the order of spawns.
    """

    name: str
    kind: type
    rank_set: RankSet
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lost: set[int] = field(default_factory=set)
    _away: set[int] = field(default_factory=set)
    num_calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    why_ended: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    on_death: Any = "fail"
    restarted_at: list[float] = field(default_factory=list)
    restarter: int = 0
    number: int = 0

    def handle(self) -> Actor:
        """Return a handle of the actor on all its ranks."""
        return Actor(self, self.rank_set.ranks)

    def make(
        self, rank_set: RankSet, *, is_again: bool = False, sink: Sink | None = None
    ) -> Run[Any]:
        """Start to make its objects on ranks.

        Args:
            rank_set: the ranks.
            is_again: whether they have replaced ranks, whose saved states they get.
            sink: shows the output; None for the calling notebook cell or the console.
        """
        every = getattr(self.kind, "checkpoint_every", 0) if self.on_death != "fail" else 0
        saved = every and (every, self.rank_set.session.ticket.directory, is_again)
        target = "__init__", self.kind, saved
        return self.start("make", target, rank_set, self.args, self.kwargs, sink=sink)

    def start(
        self, operation: str, target: tuple[Any, ...], rank_set: RankSet,
        args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *,
        interleaves: bool = False, sink: Sink | None = None,
    ) -> Run[Any]:  # fmt: skip
        """Start an operation on the actor's objects (`workers.rank.actors.Actors`).

        Args:
            operation: name of the operation.
            target: name of the method, and arguments of the operation.
            rank_set: some of the actor's ranks.
            args, kwargs: arguments of the method.
            interleaves: whether the call may wait beside other work.
            sink: shows the output; None for the calling notebook cell or the console.
        """
        kwargs = kwargs or {}
        title, place = f"{self.name}.{target[0]}", (self.name, *target)
        if operation != "make" and all(map(is_short, (*args, *kwargs, *kwargs.values(), *target))):
            pickled, buffers = Pickled(pickle.dumps((place, args, kwargs), 5)), list[Frame]()
        else:
            pickled, buffers = dump_call(title, place, args, kwargs)
        sent, frames, num_bytes = rank_set.lend(pickled, buffers)
        verb = RunCall(0, sent, interleaves=interleaves, of_actor=operation)
        return rank_set.start(verb, title, frames, num_bytes=num_bytes, sink=sink)

    def end(
        self, operation: str, target: tuple[Any, ...], rank_set: RankSet, interleaves: bool = False
    ) -> Run[Any] | None:
        """Start an operation that ends something on those of the ranks that live, if any does."""
        living = rank_set.part(rank_set.living())
        if not living.ranks:
            return None
        return self.start(operation, target, living, interleaves=interleaves)

    def check(self, ranks: Iterable[int]) -> None:
        """Raise an error unless these ranks have the actor.

        Raises:
            MeshUsageError: there is no such actor any more, or ranks were replaced.
            RankDied: ranks are dead, or new and about to have it.
        """
        if self.why_ended:
            raise MeshUsageError(f"{self.name} {self.why_ended}: mesh.spawn makes it again")
        session = self.rank_set.session
        if not (self.lost or session.core.dead) or self.restarter == threading.get_ident():
            return
        if session.life.is_over():
            return  # the call raises
        if lost := sorted((self.lost | session.dead_ranks).intersection(ranks)):
            died = session.core.dead.get(lost[0])
            if self.on_death != "fail":
                reason = died.reason if died else "is new"
                raise RankDied(
                    lost[0],
                    f"{reason}, and `{self.name}` is being made again there: mesh.heal() waits for "
                    f"that, and {self.name}.method.any(...) takes other ranks",
                )
            if died:
                raise refuse_dead(lost, died)
            raise MeshUsageError(
                f"{with_verb(lost, 'was replaced and has', 'were replaced and have')} no "
                f"`{self.name}`: mesh.spawn it again, or with on_death='restart'"
            )

    def choose(self, ranks: Sequence[int]) -> int:
        """Return the rank with the fewest calls by ``.any`` in flight, and count one more."""
        with self.lock:  # calls end on the link's thread
            rank = min(ranks, key=lambda each: (self.num_calls.get(each, (0, 0)), each))
            in_flight, total = self.num_calls.get(rank, (0, 0))
            self.num_calls[rank] = in_flight + 1, total + 1
        return rank

    def end_call(self, rank: int) -> None:
        """Record that a call that `choose` has counted has ended."""
        with self.lock:
            in_flight, total = self.num_calls[rank]
            self.num_calls[rank] = in_flight - 1, total

    def note(self, change: Change) -> None:
        """Record a change of the mesh that costs ranks the actor."""
        if change.state == "restarting":
            self.why_ended = "ended with the restart of its mesh"
            forget(self)
        match change.cause:
            case Died(rank):  # at once, as the core knows of its replacement before this does
                self.lost.update({rank}.intersection(self.rank_set.ranks))
            case Respawned(infos):
                self.lost.update({info.rank for info in infos}.intersection(self.rank_set.ranks))
                self._away -= self.lost
            case HostLost(ranks=ranks):
                self._away |= {*ranks} - self.lost
            case Returned(infos):
                self.lost -= self._away & {info.rank for info in infos}


class Actor:
    """A handle of an actor: its attributes are the methods of the actor's class.

    It has no other attributes, so that no method is hidden; ``actor[i]``, ``actor[2:4]`` and
    ``len(actor)`` are of its ranks. `Mesh.drop` and `Mesh.redefine` take it. Made by `Ranks.spawn`.

    Args:
        spawned: the actor.
        ranks: some of the actor's ranks.
    """

    __slots__ = ("__weakref__", "_methods", "_rank_set", "_spawned")

    def __init__(self, spawned: Spawned, ranks: Sequence[int]) -> None:
        self._spawned = spawned
        self._rank_set = spawned.rank_set.part(ranks, is_single=len(ranks) == 1)
        self._methods: dict[str, Method] = {}

    def __getattr__(self, name: str) -> Method:
        found = self._methods.get(name)
        kind = self._spawned.kind
        if found is None or found._kind is not kind:
            found = self._methods[name] = Method(self._spawned, self._rank_set, name)
        return found

    def __getitem__(self, index: int | slice | Sequence[int]) -> Actor:
        chosen = choose_ranks(self._rank_set.ranks, index, self._spawned.name)
        return Actor(self._spawned, chosen)

    def __len__(self) -> int:
        return len(self._rank_set)

    def __dir__(self) -> list[str]:
        return methods_of(self._spawned.kind)

    def __repr__(self) -> str:
        spawned = self._spawned
        where = f"{describe_ranks(self._rank_set.ranks)} of {self._rank_set.session.name}"
        ended = f", {spawned.why_ended}" if spawned.why_ended else ""
        return f"<actor {spawned.name}: {spawned.kind.__name__} on {where}{ended}>"

    def __reduce__(self) -> Any:
        actor = self._spawned.name, self._spawned.kind.__name__, self._rank_set.ranks
        return Address.within(self._rank_set.session.ticket, *actor).reduce()


class Method:
    """A method of an actor, to be called on its ranks.

    Args:
        spawned: the actor.
        rank_set: some of its ranks.
        name: name of the method.

    Raises:
        NoMethodError: the actor's class has no such method, or it is private.
    """

    def __init__(self, spawned: Spawned, rank_set: RankSet, name: str) -> None:
        found, function = find_method(spawned.kind, spawned.name, name)
        functools.update_wrapper(self, function, updated=())
        self._kind, self._spawned, self._rank_set = spawned.kind, spawned, rank_set
        self._name, self._is_static = name, isinstance(found, staticmethod)
        inner = inspect.unwrap(
            found.func if isinstance(found, functools.partialmethod) else function
        )
        self._interleaves = is_async(inner) or inspect.isasyncgenfunction(inner)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__wrapped__)  # type: ignore[attr-defined]
        parameters = [*signature.parameters.values()][not self._is_static :]
        return signature.replace(parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on every rank of the handle, and return its values. Blocks.

        Returns:
            `Results` (rank -> value); of an actor on one rank, and on ``actor[i]``, the value.

        Raises:
            RankFailure: the method raised on at least one rank.
            UnpicklableError: an argument cannot be pickled.
        """
        return self._start("call", (), args, kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Run[Any]:
        """Call the method on every rank of the handle, and return a `Run` without waiting.

        A method that is ``async def`` waits beside what comes after, from its first ``await`` on.
        """
        return self._start("call", (), args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Call the method on every rank of the handle, without a result; return without waiting.

        An exception is shown once, where the call was made.
        """
        self._start("send", (), args, kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Run[Any]:
        """Call the method on one rank of the handle, the living one with the fewest such calls;
        return a `Run` without waiting.
        """
        spawned, ranks = self._spawned, self._rank_set
        able = [rank for rank in ranks.living() if rank not in spawned.lost] or ranks.ranks
        rank = spawned.choose(able)
        ended = functools.partial(spawned.end_call, rank)
        try:
            run = self._start("call", (), args, kwargs, ranks.part((rank,), is_single=True))
        except BaseException:
            ended()
            raise
        run.on_end(ended)
        return run

    def sharded(self, *args: Any, dim: str = "", **kwargs: Any) -> Run[Any]:
        """Call the method with a part of the arguments' rows on each rank; return a `Run` of the
        joined results without waiting.

        Tensors and arrays, also in nested tuples, lists and dicts, are split along dim 0 as by
        ``torch.tensor_split``. Tensors in the results are joined along dim 0 (numbers are stacked);
        other results become a list with the value of each part.

        Args:
            args, kwargs: arguments of the method.
            dim: a dim of the mesh; ranks with the same index in it get the same part, and one of
                them gives its result. "" for a part for each rank.

        Raises:
            MeshUsageError: the arguments have no tensors, tensors with different numbers of rows,
                or fewer rows than there are parts; or the mesh has no such dim.
        """
        index_of = indices_in(self._rank_set.session.dims, dim, self._rank_set.ranks)
        check_rows((args, kwargs), max(index_of.values()) + 1, f"{self._spawned.name}.{self._name}")
        run = self._start("shard", (index_of,), args, kwargs, self._rank_set.part([*index_of]))
        run.combine = functools.partial(join_parts, index_of)
        return run

    def stream(self, *args: Any, ahead: int = 4, **kwargs: Any) -> ValueStream:
        """Iterate over the values that the method yields, in a ``for`` or ``async for`` loop.

        Args:
            args, kwargs: arguments of the method.
            ahead: how many more values than are read a rank may make, at least 1.

        Returns:
            An iterator over the value on one rank, else over `Results` of the ranks that have not
            ended theirs. Leaving the loop closes the generator.

        Raises:
            MeshUsageError: `ahead` is less than 1.
        """
        number, session = next(_numbers), self._rank_set.session
        sink = current_sink(session.displays)

        def start(operation: str, args: Any = (), kwargs: Any = None) -> Run[Any]:
            return self._start(operation, (number,), args, kwargs, sink=sink)

        def end(*_: Any) -> Sequence[Any]:
            target = self._name, number
            with contextlib.suppress(CellmeshError):
                self._spawned.end("end_stream", target, self._rank_set, self._interleaves)
            return ()

        # On the link's thread, as this one may be anywhere if it collects garbage.
        return ValueStream(start, lambda: session.runs.post_if_open(end), ahead, args, kwargs)

    def _start(
        self, operation: str, target: tuple[Any, ...], args: Any = (), kwargs: Any = None,
        rank_set: RankSet | None = None, sink: Sink | None = None,
    ) -> Run[Any]:  # fmt: skip
        rank_set = rank_set or self._rank_set
        self._spawned.check(rank_set.ranks)
        return self._spawned.start(
            operation,
            (self._name, *target),
            rank_set,
            args,
            kwargs,
            interleaves=self._interleaves,
            sink=sink,
        )

    def __reduce__(self) -> Any:
        return getattr, (Actor(self._spawned, self._rank_set.ranks), self._name)

    def __repr__(self) -> str:
        signature = "(...)"
        with contextlib.suppress(ValueError):  # some of Python's own methods have none
            signature = str(self.__signature__)
        return f"<method {self._spawned.name}.{self._name}{signature}>"


# ---------------------------------------------------------------- making and ending


def spawn(
    rank_set: RankSet,
    kind: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str = "",
    on_death: Any = "fail",
) -> Actor:
    """Make an object of a class on each rank, and return a handle; see `Ranks.spawn`. Blocks."""
    if not isinstance(kind, type):
        raise MeshUsageError(f"{kind!r} is no class: mesh.spawn(Trainer, *args) makes a Trainer")
    if on_death != "fail" or hasattr(kind, "checkpoint_every"):
        from .supervision import check_on_death

        check_on_death(on_death, kind)
    name = name or kind.__name__.lower()
    if not str(name).isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise MeshUsageError(
            f"name={name!r}: an actor's name is a variable of the ranks; choose one, by name=..."
        )
    if name == "mesh" or hasattr(builtins, name):
        raise MeshUsageError(
            f"name={name!r}: that is {'the DeviceMesh' if name == 'mesh' else 'a name of Python'} "
            "on the ranks; choose another, by name=..."
        )
    actors = rank_set.session.actors
    if (former := actors.get(name)) is not None and _title(former.kind) != _title(kind):
        raise MeshUsageError(
            f"{name!r} is an actor already, a {_title(former.kind)} on "
            f"{describe_ranks(former.rank_set.ranks)}: choose another name, by name=..., or "
            f"mesh.drop(mesh.actors[{name!r}]) before"
        )
    spawned = Spawned(name, kind, rank_set, args, kwargs, on_death=on_death)
    question = spawned.start("taken_by", ("__init__",), rank_set.part(rank_set.ranks))
    for rank, taken in question.result().items():
        if taken:
            raise MeshUsageError(
                f"{name!r} is a variable of rank {rank} already ({taken}), and is kept: choose "
                f"another name, as in mesh.spawn({kind.__name__}, name='{name}_actor')"
            )
    if former is not None:  # a notebook's cell is run again
        dump_call(f"{name}.__init__", (name, kind), args, kwargs)  # else the former one stays
        drop(former)
    try:
        spawned.make(rank_set).result()
    except BaseException:
        spawned.end("drop", ("__init__",), rank_set)
        raise
    add(spawned)
    keep(spawned)
    return spawned.handle()


def add(spawned: Spawned) -> None:
    """Add an actor, which is on its ranks, to those of its session."""
    session = spawned.rank_set.session
    session.actors[spawned.name] = spawned
    if spawned.on_death != "fail":
        from .supervision import Supervisor

        session.supervisor = session.supervisor or Supervisor(session)
        session.supervisor.watch(spawned)


def restore(rank_set: RankSet) -> list[str]:
    """Add the actors of a mesh to which this process has attached; return remarks on those that
    cannot be used here.
    """
    found, remarks = read_all(rank_set.session)
    for fields in found:
        add(Spawned(rank_set=rank_set.part(fields.pop("ranks")), **fields))
    return remarks


def drop(spawned: Spawned) -> None:
    """Forget an actor, whose objects are removed from its ranks. Blocks."""
    session = spawned.rank_set.session
    spawned.why_ended = "was dropped"
    session.actors.pop(spawned.name, None)
    forget(spawned)
    if (run := spawned.end("drop", ("drop",), spawned.rank_set)) is not None:
        run.result()


def redefine(spawned: Spawned, kind: type) -> None:
    """Give an actor's objects another class, on all ranks or on none. Blocks."""
    if not isinstance(kind, type):
        raise MeshUsageError(f"{kind!r} is no class: mesh.redefine({spawned.name}, Trainer)")
    living = spawned.rank_set.part(spawned.rank_set.living())
    spawned.check(living.ranks)
    try:
        spawned.start("redefine", ("redefine", kind), living).result()
    except BaseException:
        spawned.start("redefine", ("redefine", spawned.kind), living)
        raise
    spawned.kind = kind
    keep(spawned)


def spawned_of(actor: object, rank_set: RankSet) -> Spawned:
    """Return the actor of a handle.

    Raises:
        MeshUsageError: it is no handle, is one of another mesh, or its actor was dropped.
    """
    if not isinstance(actor, Actor):
        raise MeshUsageError(f"{actor!r} is no actor: mesh.spawn(...) returns one")
    spawned = actor._spawned
    if (session := spawned.rank_set.session) is not rank_set.session:
        raise MeshUsageError(f"{spawned.name} is an actor of {session.name}, another mesh")
    spawned.check(())
    return spawned


# ---------------------------------------------------------------- classes


def _title(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("__main__.")
