"""Source lines of what was typed into a notebook travel with it."""

from __future__ import annotations

import linecache
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellmesh.wire import payload
from cellmesh.workers.rank import tracebacks

NAME = "<cell of a test>"
SOURCE = """def divide(x):
    # by nothing
    def inner():
        return x / 0
    return inner()

class Kind:
    def method(self):
        return divide(1)
"""


@pytest.fixture
def typed() -> Iterator[dict[str, Any]]:
    """What a cell has defined: cloudpickle takes it by value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, NAME, "exec"), namespace)
    linecache.cache[NAME] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), NAME)
    yield namespace
    linecache.cache.pop(NAME, None)


def travel(value: Any) -> Any:
    """To a process that does not know the cell."""
    pickled, buffers = payload.dumps(value, "value")
    linecache.cache.pop(NAME, None)
    return payload.loads(pickled, buffers)


def test_tracebacks_have_their_lines_there(typed: dict[str, Any]) -> None:
    arrived = travel(typed["Kind"])
    with pytest.raises(ZeroDivisionError) as caught:
        arrived().method()
    text = "".join(traceback.format_exception(caught.value))
    assert all(line in text for line in ("return divide(1)", "return inner()", "return x / 0"))
    assert payload.cell_of(NAME) == 0


def test_each_text_travels_once(typed: dict[str, Any]) -> None:
    pickled, _ = payload.dumps((typed["divide"], typed["Kind"], typed["Kind"]()), "value")
    assert pickled.stream.count(b"# by nothing") == 1


def test_the_cells_number_travels_on(
    typed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython

    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={NAME: 7}))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    arrived = travel(typed["divide"])
    assert payload.cell_of(NAME) == 7
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    travel(arrived)
    assert payload.cell_of(NAME) == 7


def test_source_in_a_file_or_too_long_or_sent_does_not_travel(
    typed: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    assert linecache.getline(str(path), 2).strip() == "# by nothing"
    assert b"# by nothing" not in payload.dumps(namespace["divide"], "value")[0].stream

    long = SOURCE + "#" * (1 << 20)
    linecache.cache[NAME] = (len(long), None, long.splitlines(keepends=True), NAME)
    assert b"# by nothing" not in payload.dumps(typed["divide"], "value")[0].stream
    assert travel(typed["divide"]).__name__ == "divide"
    assert NAME not in linecache.cache


def test_known_source_is_not_replaced(typed: dict[str, Any]) -> None:
    pickled, buffers = payload.dumps(typed["divide"], "value")
    before = linecache.cache[NAME]
    payload.loads(pickled, buffers)
    assert linecache.cache[NAME] is before


def test_a_rank_keeps_the_text_of_the_newest_cells_and_longer_of_those_that_define(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracebacks, "_MAX_PLAIN", 2)
    monkeypatch.setattr(tracebacks, "_MAX_DEFINING", 3)
    cells = tracebacks.RankCompiler()
    texts = [
        f"{form.format(n)}  # {n}" for n in range(5) for form in ("x = {}", "def f(): return {}")
    ]
    names = [cells.cache(text, number) for number, text in enumerate(texts)]
    names.append(cells.cache(texts[6], 6))  # run again
    kept = [number for number, name in enumerate(names[:-1]) if name in linecache.cache]
    assert kept == [5, 6, 7, 8, 9]
    assert cells._filename_map.keys() == {names[number] for number in kept}
