"""Functions of modules that are edited while the mesh lives, and callables of every kind."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RanksInterrupted, UnpicklableError

TEXT = """
import functools
import {helper}
SCALE = {n}
def function(x): return x + {n}
def scaled(x): return x * SCALE
def outer(x): return {helper}.inner(x)
@functools.lru_cache
def cached(x): return x + {n}
class Model:
    def __call__(self, x): return x + {n}
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
    "lru_cache": lambda m: m.cached,
    "instance": lambda m: m.Model(),
    "class method": lambda m: m.Model.made,
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
"""
    exec(source, names)
    return names


def test_callables_of_every_kind_are_called(mesh: cm.Mesh) -> None:
    typed = typed_in()
    awaited, adder = typed["awaited"], typed["Adder"]()
    kinds: dict[str, Callable[[int], Any]] = {
        "instance": adder,
        "async method": adder.method,
        "async def": awaited,
        "partial of an async def": functools.partial(awaited),
        "lambda around an async def": (lambda f: lambda x: f(x))(awaited),
        "lru_cache": typed["cached"],
        "builtin": (1).__add__,
    }
    assert {kind: mesh.run(call, 1).list for kind, call in kinds.items()} == dict.fromkeys(
        kinds, [2] * 4
    )


def test_uncallable_objects_give_their_reason(mesh: cm.Mesh) -> None:
    with pytest.raises(UnpicklableError, match=r"call torch\.compile on the ranks$"):
        mesh.run(torch.compile(lambda x: x + 1, backend="eager"), 1)
    with pytest.raises(cm.RankFailure) as caught:
        mesh.run(typed_in()["generates"], 1)
    assert "return `list(...)` of what it yields" in str(caught.value.exceptions_by_rank[0])


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
