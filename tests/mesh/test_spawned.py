"""Processes that a cell spawns: they have the cell's definitions, as those of a script have."""

from __future__ import annotations

from pathlib import Path

import pytest

import cellmesh as cm
from tests.conftest import run_python

DEFINITIONS = """
import dataclasses, enum, multiprocessing, pickle
count = 0
LIMITS = {"most": [3, 4]}
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Item:
    x: int = 0
    colour: Colour = Colour.RED
    def most(self): return LIMITS["most"][self.x]
class Nested:
    class Inner:
        y = 5
def add():
    global count
    count += 1
def read(): return count
def count_up(queue):
    add(); add()
    queue.put(read())
def save(queue):
    queue.put(pickle.dumps(Item(1)))
def twice(queue, add, read):
    add()
    queue.put(read())
def answer(queue, items):
    item = items.get()
    queue.put((item, item.most()))
def inner(queue, given):
    queue.put(pickle.loads(pickle.dumps(given)).y)
def call(queue, functions):
    queue.put(functions.get()(4))
def helper(n): return n * LIMITS["most"][0] * len(Colour)
def fail(queue):
    queue.put("begun")
    raise Odd("no")
class Odd(Exception): pass
"""
# Each prints what a process has made of the cell's definitions.
PROGRAM = """
def begin(target, *args, shows=True):
    queue = context.Queue()
    process = context.Process(target=target, args=(queue, *args))
    process.start()
    result = queue.get(timeout=60)
    process.join()
    if shows: print(result, process.exitcode)
    return result
if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    begin(count_up)
    begin(twice, add, read)
    print(pickle.loads(begin(save, shows=False)))
    items = context.Queue(); items.put(Item(1)); begin(answer, items)
    begin(inner, Nested.Inner())
    items.put(helper); begin(call, items)
    begin(fail)
    pool = context.Pool(1); print(pool.map(helper, [1, 2]), pool.map(Item, [1, 2]))
    print(pool.apply(Item(1).most)); pool.close(); pool.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_do_as_those_of_a_script(
    quick: cm.Mesh, capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str
) -> None:
    program = DEFINITIONS + PROGRAM.replace("METHOD", method)
    script = tmp_path / "script.py"
    script.write_text(program)
    done = run_python(script)
    quick[0].cell(program)
    shown = capsys.readouterr().out.splitlines()
    assert done.stdout
    assert [line.removeprefix("[0] ") for line in shown] == done.stdout.splitlines()
    first, second = quick[0].pull("Item(1)"), quick[0].pull("Item(1)")
    assert type(first) is type(second)  # though a process was given the class
