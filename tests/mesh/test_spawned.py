"""Processes that a cell spawns: they have the cell's definitions, as those of a script have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cellmesh as cm

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
PROGRAMS = {
    "functions share globals": "begin(count_up)",
    "functions that are passed do, too": "begin(twice, add, read)",
    "an instance is saved": "print(pickle.loads(begin(save, shows=False)))",
    "an item of a queue": "items = context.Queue(); items.put(Item(1)); begin(answer, items)",
    "a nested class": "begin(inner, Nested.Inner())",
    "a function in a queue": "items = context.Queue(); items.put(helper); begin(call, items)",
    "an exception of a cell's class": "begin(fail)",
    "a pool": "pool = context.Pool(1); print(pool.map(helper, [1, 2])); pool.close(); pool.join()",
    "a pool's own definitions": "pool = context.Pool(1); print(pool.map(Item, [1, 2]))\n"
    "    print(pool.apply(Item(1).most)); pool.close(); pool.join()",
}
RUN = """
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
    PROGRAM
"""


def program(name: str, method: str) -> str:
    run = RUN.replace("METHOD", method).replace("PROGRAM", PROGRAMS[name])
    return DEFINITIONS + run


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_spawned_process_does_as_that_of_a_script(
    quick: cm.Mesh, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, method: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(program(name, method))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True
    )
    quick[0].cell(program(name, method))
    shown = capsys.readouterr().out.splitlines()
    assert done.stdout
    assert [line.removeprefix("[0] ") for line in shown] == done.stdout.splitlines()


def test_what_cannot_be_sent_stays_unless_the_process_is_given_it(
    quick: cm.Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = program("an item of a queue", "spawn")
    quick[0].cell(
        f"import threading\nclass Locked:\n    lock = threading.Lock()\n"
        f"big = torch.zeros(1 << 20)\ndef uses(): return big\n{cell}"
    )
    assert "Item(x=1" in capsys.readouterr().out
    with pytest.raises(cm.RankFailure, match="cannot pickle '_thread"):
        quick[0].cell("begin(inner, Locked)")


def test_a_class_that_was_sent_to_a_process_is_one_class_in_the_notebook(quick: cm.Mesh) -> None:
    quick.cell(program("an item of a queue", "spawn"))
    first, second = quick.pull("Item(1)").values()
    assert first == second
