"""Functions of modules that are edited while the mesh lives, and callables of every kind."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RanksInterrupted, UnpicklableError

TEXT = """
import functools
import {helper}
from {helper} import inner
SCALE = {n}
def function(x): return x + {n}
def scaled(x): return x * SCALE
def outer(x): return {helper}.inner(x)
def taken(x): return inner(x)
async def awaited(x): return x + {n}
@functools.lru_cache
def cached(x): return x + {n}
class Model:
    def __call__(self, x): return x + {n}
    def method(self, x): return x + {n}
    @staticmethod
    def static(x): return x + {n}
    @classmethod
    def made(cls, x): return cls()(x)
"""


class Project:
    """A module and its helper in a directory on `sys.path`, rewritten with another number at each
    edit.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name, self.helper = directory, name, f"{name}_helper"
        self.edit(1)
        importlib.invalidate_caches()
        self.module: Any = importlib.import_module(name)

    def edit(self, n: int, name: str = "") -> None:
        texts = {
            self.name: TEXT.format(helper=self.helper, n=n),
            self.helper: f"def inner(x): return x + {n}\n",
        }
        for each in [name] if name else texts:
            file = self.directory / f"{each}.py"
            file.write_text(texts[each] + "#" * n)  # of another size, as times may be too close
            os.utime(file, (1e9 + n, 1e9 + n))

    def reload(self) -> None:
        importlib.reload(sys.modules[self.helper])
        importlib.reload(self.module)


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    name = f"project_{abs(hash(request.node.name))}"
    sys.path.append(str(tmp_path))  # ranks have not got it
    yield Project(tmp_path, name)
    sys.path.remove(str(tmp_path))
    for each in (name, f"{name}_helper"):
        sys.modules.pop(each, None)


# How a function is taken from the module, or refers to it.
TAKEN: dict[str, Callable[[Any], Callable[[int], Any]]] = {
    "function": lambda m: m.function,
    "constant": lambda m: m.scaled,
    "helper": lambda m: m.outer,
    "imported from helper": lambda m: m.taken,
    "async def": lambda m: m.awaited,
    "lru_cache": lambda m: m.cached,
    "instance": lambda m: m.Model(),
    "bound method": lambda m: m.Model().method,
    "static": lambda m: m.Model.static,
    "class method": lambda m: m.Model.made,
    "partial": lambda m: functools.partial(m.function),
    "lambda that uses the module": lambda m: lambda x: m.function(x),
    "lambda that uses the function": lambda m: (lambda f: lambda x: f(x))(m.function),
}


def test_ranks_run_what_the_notebook_has_reloaded(mesh: cm.Mesh, project: Project) -> None:
    def values() -> dict[str, Any]:
        return {
            name: set(mesh.run(take(project.module), 1).values()) for name, take in TAKEN.items()
        }

    def expected(n: int) -> dict[str, Any]:
        return {name: {n if name == "constant" else 1 + n} for name in TAKEN}

    assert values() == expected(1)
    mesh.cell(f"import {project.name} as m; kept, model = m.function, m.Model()")
    project.edit(2)
    # Edited and not reloaded: the notebook runs the old text, and so do ranks.
    assert values() == expected(1)
    project.reload()
    assert values() == expected(2)
    # What ranks hold is updated in place, as %autoreload does.
    assert mesh.pull("m.function(1), kept(1), model(1)").list == [(3, 3, 3)] * 4
    mesh.push(pushed=project.module.function, instance=project.module.Model())
    assert mesh.pull("pushed(1), instance(1), type(instance) is m.Model").list == [(3, 3, True)] * 4
    project.edit(3, project.helper)  # what a function calls, not its own module
    importlib.reload(sys.modules[project.helper])
    assert set(mesh.run(project.module.outer, 1).values()) == {4}


def test_a_text_that_the_notebook_has_not_is_refused_with_what_to_type(
    mesh: cm.Mesh, project: Project
) -> None:
    project.edit(2)
    with pytest.raises(cm.RankFailure) as caught:
        mesh.run(project.module.function, 1)  # first imported there after the edit
    error = caught.value.exceptions_by_rank[0]
    assert isinstance(error, MeshUsageError)
    assert (
        "has changed since the notebook loaded it: reload it there "
        f"(`importlib.reload({project.name})`" in str(error)
    )
    project.reload()
    assert set(mesh.run(project.module.function, 1).values()) == {3}


def test_a_module_that_does_not_run_on_ranks_leaves_what_they_had(
    mesh: cm.Mesh, project: Project
) -> None:
    mesh.run(project.module.function, 1)
    file = project.directory / f"{project.name}.py"
    file.write_text(
        f"{TEXT.format(helper=project.helper, n=5)}\nif 'rank' in "
        "__import__('__main__').__dict__: 1 / 0"
    )
    project.reload()
    with pytest.raises(cm.RankFailure) as caught:
        mesh.run(project.module.function, 1)
    assert isinstance(caught.value.exceptions_by_rank[3], ZeroDivisionError)
    assert mesh.pull(f"__import__('{project.name}').function(1)").list == [2] * 4


class Adder:
    def __call__(self, x: int) -> int:
        return x + 1


class AsyncAdder:
    async def __call__(self, x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    async def method(self, x: int) -> int:
        return await self(x)


def made_by_hand() -> ModuleType:
    module = ModuleType("made_by_hand")
    exec("K = 1\ndef f(x): return g(x)\ndef g(x): return x + K", vars(module))
    sys.modules["made_by_hand"] = module
    return module


def typed_in() -> dict[str, Any]:
    """Callables as cells define them: they travel by value."""
    names: dict[str, Any] = {"__name__": "__main__", "functools": functools}
    source = """
@functools.lru_cache(maxsize=2)
def cached(x): return x + 1
async def awaited(x): return x + 1
class Adder:
    def __call__(self, x): return x + 1
    async def method(self, x): return x + 1
def generates(x): yield x
async def agenerates(x): yield x
"""
    exec(source, names)
    return names


CALLABLES: dict[str, Callable[[], Callable[[int], Any]]] = {
    "instance": lambda: typed_in()["Adder"](),
    "instance of a module's class": Adder,
    "bound method": lambda: Adder().__call__,
    "async def": lambda: typed_in()["awaited"],
    "async instance": AsyncAdder,
    "async method": lambda: typed_in()["Adder"]().method,
    "partial of an async def": lambda: functools.partial(typed_in()["awaited"]),
    "lambda around an async def": lambda: (lambda f: lambda x: f(x))(typed_in()["awaited"]),
    "lru_cache": lambda: typed_in()["cached"],
    "function of a module made by hand": lambda: made_by_hand().f,  # type: ignore[no-any-return]
    "partial": lambda: functools.partial(lambda a, b: a + b, 1),
    "builtin": lambda: (1).__add__,
}


@pytest.mark.parametrize("make", CALLABLES.values(), ids=CALLABLES)
def test_callables_of_every_kind_are_called(
    mesh: cm.Mesh, make: Callable[[], Callable[[int], Any]]
) -> None:
    assert mesh.run(make(), 1).list == [2] * 4


REFUSED: dict[str, tuple[Callable[[], Callable[[int], Any]], str]] = {
    "generator": (lambda: typed_in()["generates"], "return `list(...)` of what it yields"),
    "async generator": (lambda: typed_in()["agenerates"], "return `list(...)` of what it yields"),
    "compiled": (
        lambda: torch.compile(lambda x: x + 1, backend="eager"),
        "call torch.compile on the ranks",
    ),
}


@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_uncallable_object_gives_its_reason(
    mesh: cm.Mesh, make: Callable[[], Callable[[int], Any]], said: str
) -> None:
    with pytest.raises((cm.RankFailure, UnpicklableError)) as caught:
        mesh.run(make(), 1)
    error = caught.value
    if isinstance(error, cm.RankFailure):
        error = error.exceptions_by_rank[0]  # type: ignore[assignment]
    assert str(error).endswith(said)


def test_a_coroutine_of_a_call_shares_the_loop_of_cells_and_can_be_stopped(mesh: cm.Mesh) -> None:
    mesh.cell("import asyncio; gate = asyncio.Event(); await asyncio.sleep(0)")

    async def wait() -> bool:
        return await gate.wait()  # type: ignore[name-defined, no-any-return]  # noqa: F821

    async def open_gate() -> None:
        gate.set()  # type: ignore[name-defined]  # noqa: F821

    run = mesh.submit(wait)
    run.interrupt()
    with pytest.raises(RanksInterrupted):
        run.result()
    mesh.run(open_gate)
    assert mesh.run(wait).list == [True] * 4
