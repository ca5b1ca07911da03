"""Which text of a module the notebook says that it has loaded."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from IPython.extensions.autoreload import ModuleReloader

from cellmesh.wire.modules import LoadedModules, find


class Notebook:
    """A notebook with ``%autoreload 2`` and one module, of which it says what ranks are told."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "edited.py"
        self.edit(1)
        self.loaded = LoadedModules()
        self.module = importlib.import_module("edited")
        self.loaded.reducer()(self.module)  # as `record` does at the start
        self.reloader = ModuleReloader()  # type: ignore[no-untyped-call]
        self.reloader.check(check_all=True, do_reload=False)  # type: ignore[no-untyped-call]
        registry = {"AutoreloadMagics": SimpleNamespace(_reloader=self.reloader)}
        self.shell = SimpleNamespace(
            execution_count=1, magics_manager=SimpleNamespace(registry=registry)
        )
        self.loaded._shell = self.shell

    def edit(self, n: int, text: str = "def function(): return {n}\n") -> None:
        self.file.write_text(text.format(n=n) + "#" * n)
        os.utime(self.file, (1e9 + n, 1e9 + n))

    def run_cell(self) -> None:
        self.reloader.check(check_all=True)  # type: ignore[no-untyped-call]
        self.shell.execution_count += 1

    def told(self) -> float:
        """The time of the text that ranks are told of."""
        made, (name, names, table) = self.loaded.reducer()(self.module.function)
        assert (made, name, names) == (find, "edited", "function")
        stamp = msgspec.msgpack.decode(table)[0]["edited"]
        return float(stamp[0]) - 1e9


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Notebook(tmp_path)
    del sys.modules["edited"]


def reload_by_hand(notebook: Notebook) -> None:
    # What `record` has the import system note; other modules of this process are not to be noted by
    # a test.
    importlib.reload(notebook.module)
    notebook.loaded._stamps[str(notebook.file)] = (1e9 + 2, notebook.file.stat().st_size)
    notebook.loaded.num_loads += 1


DONE: dict[str, tuple[Callable[[Notebook], None], int]] = {
    "nothing": (lambda n: None, 1),
    "edited and reloaded": (lambda n: (n.edit(2), reload_by_hand(n))[0], 2),
    "edited, and a cell run": (lambda n: (n.edit(2), n.run_cell())[0], 2),
    "edited after the cell": (lambda n: (n.run_cell(), n.edit(2))[0], 1),
}


@pytest.mark.parametrize(("do", "told"), DONE.values(), ids=DONE)
@pytest.mark.filterwarnings("ignore")
def test_table_names_the_loaded_source(
    notebook: Notebook, do: Callable[[Notebook], None], told: int
) -> None:
    assert notebook.told() == 1
    do(notebook)
    assert notebook.told() == told
    assert notebook.module.function() == told


def test_only_what_the_user_edits_travels_with_its_text(notebook: Notebook) -> None:
    by_hand = ModuleType("by_hand")
    exec("def f(): pass", vars(by_hand))
    sys.modules["by_hand"] = by_hand
    try:
        reduce = notebook.loaded.reducer()
        for plain in (json_dumps(), find, ModuleType, by_hand.f, 1, "text"):
            assert reduce(plain) is NotImplemented
        assert reduce(notebook.module)[1][:2] == ("edited", "")
    finally:
        del sys.modules["by_hand"]


def json_dumps() -> Any:
    import json

    return json.dumps
