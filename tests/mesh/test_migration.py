"""The lines of docs/from_monarch.md and docs/from_ray.md, executed."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cellmesh as cm
from tests.support.migration import CHECKS, cells, line_of

LINES = [line for line in dict.fromkeys(map(line_of, cells())) if line in CHECKS]


class Counter:
    """The actor of the tables."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def get(self) -> int:
        return self.value

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def values(self, num: int) -> Iterator[int]:
        yield from range(num)

    def fail(self) -> None:
        raise ValueError("no")

    async def wait(self, name: str) -> None:
        import asyncio

        self.events = vars(self).get("events", {})
        await self.events.setdefault(name, asyncio.Event()).wait()

    def let_go(self, name: str) -> None:
        self.events[name].set()


class Client:
    """Calls the actor from another mesh."""

    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def ask(self) -> Any:
        return self.counter.get()

    def read(self) -> list[int]:
        return [*self.counter.values.stream(3)]

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter.rows.sharded(x).result()  # type: ignore[no-any-return]


def functions() -> dict[str, Any]:
    """Return functions that are sent by value, as a notebook's are."""

    def fail_on_one() -> None:
        if rank == 1:  # type: ignore[name-defined]  # noqa: F821
            raise ValueError("no")
        dist.barrier()  # type: ignore[name-defined]  # noqa: F821

    def sum_of_ones() -> float:
        one = torch.ones(1)
        dist.all_reduce(one)  # type: ignore[name-defined]  # noqa: F821
        return one.item()

    return {"fail_on_one": fail_on_one, "sum_of_ones": sum_of_ones}


@pytest.fixture(scope="module")
def borrowed(mesh: cm.Mesh) -> Iterator[cm.Mesh]:
    with cm.start(2, name="borrowed") as started:
        yield started


def execute(source: str, namespace: dict[str, Any]) -> Any:
    """Execute source, and return the value of an expression."""
    try:
        code = compile(source, "<line>", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        code = compile(source, "<line>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:

        async def main() -> Any:
            return await eval(code, namespace)

        return asyncio.run(main())
    return eval(code, namespace)


@pytest.mark.parametrize("line", LINES)
def test_line(
    line: str, mesh: cm.Mesh, borrowed: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    check = CHECKS[line]
    namespace: dict[str, Any] = {**globals(), "mesh": mesh, "borrowed": borrowed, "error": None}
    namespace |= functions()
    namespace["counter"] = mesh.spawn(Counter, 0)
    namespace["shown"] = lambda: capsys.readouterr().out
    execute(check.before, namespace)
    try:
        try:
            namespace["_"] = execute(line, namespace)
        except cm.CellmeshError as error:
            namespace["error"] = error
        assert execute(check.after, namespace), namespace["error"]
    finally:
        execute(check.finally_, namespace)
        for actor in mesh.actors.values():
            mesh.drop(actor)
