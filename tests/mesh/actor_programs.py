"""Random programs of actors on two meshes, played on ranks and by plain asyncio at once.

``python -m tests.mesh.actor_programs --seeds 200`` plays many; `test_actor_programs` a few.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cellmesh as cm
from cellmesh.controller.run import Run
from cellmesh.errors import MeshUsageError, RankDied, RankFailure, RanksInterrupted

WAIT_S = 60.0
NAMES = ("first", "second")
EVENTS = ("dawn", "noon", "dusk")


class Subject:
    """An actor whose log has the number of each call in the order in which they begin."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.log: list[int] = []
        self.events: dict[str, Any] = {}

    def add(self, call: int, number: int) -> int:
        self.log.append(call)
        self.count += number
        return self.count

    def fail(self, call: int) -> None:
        self.log.append(call)
        raise ValueError(call)

    def spin(self, call: int) -> None:
        import time

        self.log.append(call)
        while True:
            time.sleep(0.001)

    def let_go(self, call: int, event: str) -> None:
        self.log.append(call)
        self.find(event).set()

    async def wait(self, call: int, event: str, fails: bool = False) -> int:
        self.log.append(call)
        await self.find(event).wait()
        if fails:
            raise ValueError(call)
        return call

    def double(self, call: int, rows: Any) -> Any:
        self.log.append(call)
        return {"rows": rows * 2, "call": call}

    def values(self, call: int, num: int, fails_at: int = -1) -> Iterator[int]:
        for index in self.opened(range(num)):
            if index == fails_at:
                raise ValueError(call)
            yield 100 * call + index

    async def ticks(self, call: int, num: int) -> Any:
        for index in self.opened(range(num)):
            yield 100 * call + index
        await self.find(f"never {call}").wait()

    def find(self, event: str) -> Any:
        import asyncio

        return self.events.setdefault(event, asyncio.Event())

    def opened(self, values: Any) -> Iterator[Any]:
        """Count the generators of this process that are open."""
        import __main__

        count = vars(__main__).setdefault("num_open", [0])
        count[0] += 1
        try:
            yield from values
        finally:
            count[0] -= 1


class Doubled(Subject):
    """The class that a redefinition gives."""

    def add(self, call: int, number: int) -> int:
        return super().add(call, 2 * number)


@dataclass
class Acting:
    """An actor, and what plain Python holds in its place: an object a rank."""

    mesh: cm.Mesh
    handle: Any
    models: dict[int, Subject]
    kind: type = Subject


@dataclass
class Called:
    """A call, and how it is to end on each rank: a value, a type of error, or a task's end."""

    number: int
    run: Run[Any]
    ends: dict[int, Any]
    is_cancelled: bool = False


def is_pending(end: object) -> bool:
    return isinstance(end, asyncio.Task) and not end.done()


@dataclass
class Program:
    """A program from a seed.

    Args:
        meshes: the meshes, which nothing else uses.
        seed: the seed.
        may_kill: whether it kills ranks and heals.
    """

    meshes: Sequence[cm.Mesh]
    seed: int
    may_kill: bool = False
    trace: list[str] = field(default_factory=list)
    acting: dict[tuple[int, str], Acting] = field(default_factory=dict)
    calls: list[Called] = field(default_factory=list)
    streams: list[tuple[int, Any, list[Any], list[Any], Any]] = field(default_factory=list)
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.loop = asyncio.new_event_loop()

    def play(self, num_steps: int) -> None:
        """Play the program, and check all that it has left."""
        weights = {
            self.spawn: 3, self.call: 6, self.submit: 6, self.send: 4, self.any: 4, self.wait: 8,
            self.let_go: 4, self.cancel: 3, self.fail: 3, self.spin: 0.5, self.shard: 2,
            self.open_stream: 4, self.read_stream: 8, self.redefine: 2, self.drop: 1, self.cell: 2,
            self.await_all: 2, self.kill: 0.7 if self.may_kill else 0,
        }  # fmt: skip
        try:
            self.spawn()
            for step in self.random.choices([*weights], [*weights.values()], k=num_steps):
                self.trace.append(step.__name__)
                step()
            self.trace.append("finish")
            self.finish()
        except BaseException as error:
            error.add_note(f"seed {self.seed}: {' '.join(self.trace[-12:])}")
            raise
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()
            self.loop.close()

    # ---- steps

    def spawn(self) -> None:
        index, name = self.random.randrange(len(self.meshes)), self.random.choice(NAMES)
        mesh, start = self.meshes[index], self.random.randrange(10)
        ranks = self.some(range(len(mesh)))
        former = self.acting.get((index, name))
        if former is not None and former.kind is not Subject:
            self.raises(MeshUsageError, lambda: mesh.spawn(Subject, 0, name=name))
            return
        handle: Any = mesh[ranks].spawn(Subject, start, name=name)
        self.acting[index, name] = Acting(mesh, handle, {rank: Subject(start) for rank in ranks})

    def call(self) -> None:
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number, add = self.new_call(), self.random.randrange(5)
            values = handle.add(number, add)
            wanted = {rank: acting.models[rank].add(number, add) for rank in ranks}
            assert values == (wanted if len(ranks) > 1 else wanted[ranks[0]])

    def submit(self) -> None:
        self.start(lambda handle: handle.add.submit, lambda model: model.add, 3)

    def send(self) -> None:
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number, event = self.new_call(), self.random.choice(EVENTS)
            if self.random.random() < 0.3:
                handle.wait.send(number, event)
                for rank in ranks:
                    self.ends_of(acting.models[rank].wait, number, event)
            elif self.random.random() < 0.3:  # it is shown, and changes nothing else
                handle.fail.send(number)
                for rank in ranks:
                    self.ends_of(acting.models[rank].fail, number)
            else:
                handle.add.send(number, 2)
                for rank in ranks:
                    acting.models[rank].add(number, 2)

    def any(self) -> None:
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number, event = self.new_call(), self.random.choice(EVENTS)
            method, further = self.random.choice([("add", 4), ("wait", event)])
            run = getattr(handle, method).any(number, further)
            (rank,) = run.ranks
            assert rank in ranks
            model = getattr(acting.models[rank], method)
            self.calls.append(Called(number, run, {rank: self.ends_of(model, number, further)}))

    def wait(self) -> None:
        fails = self.random.random() < 0.15
        event = self.random.choice(EVENTS)
        self.start(lambda handle: handle.wait.submit, lambda model: model.wait, event, fails)

    def let_go(self) -> None:
        event = self.random.choice(EVENTS)
        self.start(lambda handle: handle.let_go.submit, lambda model: model.let_go, event)

    def fail(self) -> None:
        self.start(lambda handle: handle.fail.submit, lambda model: model.fail)

    def spin(self) -> None:
        """Cancel a call that computes; the one behind it is executed."""
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number = self.new_call()
            run = handle.spin.submit(number)
            behind = handle.add.submit(number + 1, 1)
            self.until(lambda: set(ranks) <= self.busy_with(acting.mesh, run), "a spinning call")
            run.cancel()
            self.raises(RanksInterrupted, lambda: run.result(WAIT_S))
            ends: dict[int, Any] = {}
            for rank in ranks:
                acting.models[rank].log.append(number)
                ends[rank] = acting.models[rank].add(number + 1, 1)
            self.calls.append(Called(self.new_call(), behind, ends))

    def cancel(self) -> None:
        """Cancel a call that waits on all of its ranks."""
        waiting = [
            each for each in self.calls if each.ends and all(map(is_pending, each.ends.values()))
        ]
        if waiting:
            called = self.random.choice(waiting)
            called.is_cancelled = called.run.cancel()
            assert called.is_cancelled
            assert called.run.wait(WAIT_S)  # else it could still end with a value
            for task in called.ends.values():
                task.cancel()
            self.settle()

    def shard(self) -> None:
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number, rows = self.new_call(), torch.arange(float(len(ranks) + 2))
            found = handle.double.sharded(number, rows).result(WAIT_S)
            for rank in ranks:
                acting.models[rank].log.append(number)
            assert torch.equal(found["rows"], 2 * rows)
            assert found["call"] == [number] * len(ranks)

    def open_stream(self) -> None:
        if chosen := self.choose():
            _, handle, ranks = chosen
            number, num = self.new_call(), self.random.randrange(6)
            ahead = self.random.randrange(1, 6)
            values: list[Any] = [100 * number + index for index in range(num)]
            if self.random.random() < 0.3:
                method = handle.ticks
                stream = method.stream(number, num, ahead=ahead)
                values.append("waits")
            else:
                fails_at = self.random.randrange(6) if self.random.random() < 0.3 else -1
                method = handle.values
                stream = method.stream(number, num, fails_at=fails_at, ahead=ahead)
                fails = 0 <= fails_at < num
                values = [*values[:fails_at], RankFailure] if fails else [*values, None]
            self.streams.append((number, stream, values, ranks, method))

    def read_stream(self) -> None:
        """Read from a stream, and sometimes leave it."""
        if not self.streams:
            return
        at = self.random.randrange(len(self.streams))
        _, stream, values, ranks, method = self.streams[at]
        for _ in range(self.random.randrange(1, 4)):
            wanted = values[0]
            if method._spawned.why_ended:
                del self.streams[at]
                if isinstance(wanted, int):
                    self.raises(MeshUsageError, lambda: next(stream))
                return
            if wanted == "waits":
                break
            if wanted is None:
                assert next(stream, None) is None
                break
            if wanted is RankFailure:
                self.raises(RankFailure, lambda: next(stream))
                values[:] = [None]
                continue
            found = next(stream) if self.random.random() < 0.8 else asyncio.run(anext_of(stream))
            assert found == (dict.fromkeys(ranks, wanted) if len(ranks) > 1 else wanted)
            del values[0]
        if self.random.random() < 0.3:
            how = self.random.randrange(2)
            del self.streams[at]
            if how:
                stream.close()
                assert next(stream, None) is None

    def redefine(self) -> None:
        acting = self.whole()
        if acting is not None:
            acting.kind = self.random.choice([Subject, Doubled])
            acting.mesh.redefine(acting.handle, acting.kind)
            for model in acting.models.values():
                model.__class__ = acting.kind

    def drop(self) -> None:
        if self.acting:
            key = self.random.choice([*self.acting])
            acting = self.acting.pop(key)
            acting.mesh.drop(acting.handle)
            self.raises(MeshUsageError, lambda: acting.handle.add(0, 0))
            self.raises(MeshUsageError, lambda: acting.mesh.drop(acting.handle))
            # What they leave goes on, also on ranks that were replaced.

    def cell(self) -> None:
        if chosen := self.choose():
            acting, _, ranks = chosen
            name = next(name for (_, name), each in self.acting.items() if each is acting)
            number = self.new_call()
            acting.mesh[ranks].cell(f"{name}.add({number}, 3)")
            counts = {rank: acting.models[rank].add(number, 3) for rank in ranks}
            assert acting.mesh[ranks].pull(f"{name}.count") == counts

    def await_all(self) -> None:
        """Await several calls at once, as an asynchronous notebook cell does."""
        if chosen := self.choose():
            acting, handle, ranks = chosen
            numbers = [self.new_call() for _ in range(3)]

            async def call_all() -> list[Any]:
                return await asyncio.gather(*(handle.add.submit(each, 1) for each in numbers))

            for number, found in zip(numbers, asyncio.run(call_all()), strict=True):
                wanted = {rank: acting.models[rank].add(number, 1) for rank in ranks}
                assert found == (wanted if len(ranks) > 1 else wanted[ranks[0]])

    def kill(self) -> None:
        """Kill a rank; calls on others go on, before and after the heal."""
        mesh = self.random.choice(self.meshes)
        rank = self.random.randrange(len(mesh))
        self.wait_for_work()
        self.streams = []  # of which some are open
        os.kill(mesh[rank].pull("__import__('os').getpid()"), signal.SIGKILL)
        self.until(lambda: mesh.report()[rank].phase == "dead", "a death")
        for called in self.calls:
            if self.mesh_of(called) is mesh and is_pending(task := called.ends.get(rank)):
                task.cancel()
                called.ends[rank] = RankDied
        self.settle()
        on_mesh = [each for each in self.acting.values() if each.mesh is mesh]
        for acting in on_mesh:
            if acting.models.pop(rank, None) is not None:
                kinds = RankDied, RankFailure, MeshUsageError  # it may have lost another before
                self.raises(kinds, lambda: acting.handle.add(0, 0))  # noqa: B023
        for _ in range(3):
            self.random.choice([self.call, self.submit, self.any, self.let_go])()
        self.wait_for_work()
        mesh.heal()
        for acting in on_mesh:
            if len(acting.models) < len(acting.handle):
                self.raises(MeshUsageError, lambda: acting.handle.add(0, 0))  # noqa: B023

    def finish(self) -> None:
        """Let go of all that waits, and check values, order and that nothing is left."""
        for acting in self.acting.values():
            for event in EVENTS if acting.models else ():
                number = self.new_call()
                self.part(acting, [*acting.models]).let_go(number, event)
                for model in acting.models.values():
                    model.let_go(number, event)
        self.settle()
        self.streams = []
        for called in self.calls:
            if any(map(is_pending, called.ends.values())):  # of an actor that was dropped
                called.is_cancelled |= called.run.cancel()
            self.check_end(called)
        for mesh in self.meshes:
            for run in mesh.runs:
                if run.title.endswith(".wait"):  # sent to an actor that was dropped
                    run.cancel()
                assert run.wait(WAIT_S), f"{run} is left"
        for (_, name), acting in self.acting.items():
            if acting.models:
                part = acting.mesh[[*acting.models]]
                # Cancelled before they began, or sent while a death was not known yet.
                unsure = [0, *(each.number for each in self.calls if each.is_cancelled)]
                wanted = {
                    rank: ([each for each in model.log if each not in unsure], model.count)
                    for rank, model in acting.models.items()
                }
                log = f"[each for each in {name}.log if each not in {unsure}]"
                found = part.pull(f"({log}, {name}.count)")
                assert found == wanted, f"{name}: {found} and not {wanted}"
            acting.mesh.drop(acting.handle)
        for mesh in self.meshes:
            self.until(
                lambda: not sum(mesh.pull("globals().get('num_open', [0])[0]").values()),  # noqa: B023
                "the end of all generators",
            )
            self.until(lambda: not mesh.runs, "the end of all runs")  # noqa: B023
            assert not any(state.waiting for state in mesh.states().values())
            assert mesh.actors == {}
            left = mesh.pull(f"[each for each in {NAMES!r} if each in globals()]")
            assert not any(left.values()), left

    # ---- inside

    def wait_for_work(self) -> None:
        """Wait until only calls that wait for an event are in flight."""
        for called in self.calls:
            if not any(map(is_pending, called.ends.values())):
                assert called.run.wait(WAIT_S)

    def check_end(self, called: Called) -> None:
        if called.is_cancelled:
            self.raises(RanksInterrupted, lambda: called.run.result(WAIT_S))
            return
        values, errors = called.run.gather(WAIT_S)
        wanted = {}
        for rank, end in called.ends.items():
            if isinstance(end, asyncio.Task):
                error = end.exception()
                end = end.result() if error is None else type(error)
            wanted[rank] = end
        found = values | {rank: type(error) for rank, error in errors.items()}
        assert found == wanted, f"call {called.number}: {found} and not {wanted}"

    def start(self, method: Any, model: Callable[[Any], Any], *args: Any) -> None:
        if chosen := self.choose():
            acting, handle, ranks = chosen
            number = self.new_call()
            run = method(handle)(number, *args)
            ends = {rank: self.ends_of(model(acting.models[rank]), number, *args) for rank in ranks}
            self.calls.append(Called(number, run, ends))

    def ends_of(self, method: Callable[..., Any], *args: Any) -> Any:
        """Return how a call ends in plain asyncio: a value, a type of error, or a task."""
        try:
            value = method(*args)
        except ValueError as error:
            return type(error)
        finally:
            self.settle()
        if asyncio.iscoroutine(value):
            value = self.loop.create_task(value)
            self.settle()
        return value

    def settle(self) -> None:
        """Let tasks of plain asyncio go on until all wait."""

        async def pass_by() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pass_by())

    def new_call(self) -> int:
        self.num_calls += 2
        return self.num_calls

    def choose(self) -> tuple[Acting, Any, list[int]] | None:
        """Choose an actor, and a handle of some of its ranks."""
        usable = [each for each in self.acting.values() if each.models]
        if not usable:
            return None
        acting = self.random.choice(usable)
        ranks = self.some([*acting.models])
        return acting, self.part(acting, ranks), ranks

    def part(self, acting: Acting, ranks: Sequence[int]) -> Any:
        own = acting.handle._rank_set.ranks
        return acting.handle if [*own] == [*ranks] else acting.handle[[own.index(r) for r in ranks]]

    def whole(self) -> Acting | None:
        """Choose an actor that no rank has lost."""
        whole = [each for each in self.acting.values() if len(each.models) == len(each.handle)]
        return self.random.choice(whole) if whole else None

    def some(self, ranks: Sequence[int]) -> list[int]:
        return sorted(self.random.sample([*ranks], self.random.randint(1, len(ranks))))

    def mesh_of(self, called: Called) -> cm.Mesh:
        control = called.run._control
        return next(each for each in self.meshes if each.rank_set.session.runs is control)

    def busy_with(self, mesh: cm.Mesh, run: Run[Any]) -> set[int]:
        return {rank for rank, state in mesh.states().items() if state.run == run.number}

    def until(self, holds: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, f"no end of the wait for {name}"
            time.sleep(0.01)

    def raises(self, kinds: Any, act: Callable[[], object]) -> None:
        try:
            found = act()
        except kinds:
            return
        raise AssertionError(f"{found!r} in place of {kinds}")


async def anext_of(stream: Any) -> Any:
    return await anext(stream)


@contextlib.contextmanager
def two_meshes() -> Iterator[list[cm.Mesh]]:
    """Start a mesh of three ranks, and one of two."""
    with cm.start(3, name="players") as players, cm.start(2, name="extras") as extras:
        yield [players, extras]


def main(arguments: Sequence[str]) -> int:
    """Play many programs."""
    parser = argparse.ArgumentParser(prog="python -m tests.mesh.actor_programs")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", action="store_true")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    with two_meshes() as meshes:
        for seed in range(given.first, given.first + given.seeds):
            Program(meshes, seed, given.kill).play(given.steps)
    print(f"{given.seeds} programs in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
