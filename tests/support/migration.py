"""The tables of docs/from_monarch.md and docs/from_ray.md, and the checks of their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("from_monarch.md", "from_ray.md")


@dataclass(frozen=True)
class Check:
    """A line that is executed.

    Attributes:
        after: an expression that is true afterwards; `_` is the line's value, `error` what it has
            raised.
        before: source that is executed before it.
        finally_: source that is executed at last.
    """

    after: str = "error is None"
    before: str = ""
    finally_: str = ""


OTHER = "other = borrowed; other.cell('model = torch.nn.Linear(2, 2)')"
MODEL = "mesh.cell('model = torch.nn.Linear(2, 2)')"
CHECKS = {
    # processes
    "four = cm.start(4)": Check("len(four) == 4", finally_="four.stop()"),
    'grid = cm.start(4, mesh={"dp": 2, "tp": 2})': Check(
        "grid.dims == {'dp': 2, 'tp': 2}", finally_="grid.stop()"
    ),
    'other = cm.start(2, name="generator")': Check(
        "cm.meshes['generator'] is other", finally_="other.stop()"
    ),
    'mesh.pull("dist.get_world_size()")': Check("_.list == [4] * 4"),
    "scorer = cm.start(1, group=False)": Check(
        "scorer.pull('dist.is_initialized()').list == [False]", finally_="scorer.stop()"
    ),
    "mesh.stop()": Check("len(cm.meshes) == 2", "mesh = cm.start(1, group=False)"),
    # actors
    "isinstance(Counter, type)": Check("_ and Counter.__bases__ == (object,)"),
    "counter = mesh.spawn(Counter, 0)": Check("counter.get().list == [0] * 4"),
    'pair = mesh[0:2].spawn(Counter, 0, name="pair")': Check(
        "pair.get() == {0: 0, 1: 0}", finally_="mesh.drop(pair)"
    ),
    "counter.get()": Check("_ == {0: 0, 1: 0, 2: 0, 3: 0}"),
    "counter[2].get()": Check("_ == 0"),
    "run = counter.get.submit()": Check("run.result(60).list == [0] * 4"),
    "run = counter[2].get.submit()": Check("run.result(60) == 0"),
    "await counter.get.submit()": Check("_.list == [0] * 4"),
    "await counter[2].get.submit()": Check("_ == 0"),
    "counter.get.submit().result(timeout_s=5)": Check("_.list == [0] * 4"),
    "counter.add.send(1)": Check("_ is None and counter.get().list == [1] * 4"),
    "counter.get.any()": Check("_.ranks == (0,) and counter.get.any().ranks == (1,)"),
    "counter.add.any(1)": Check("_.result(60) == 1 and counter.get().list == [1, 0, 0, 0]"),
    "[pair async for pair in counter.get.submit()]": Check("dict(_) == dict.fromkeys(range(4), 0)"),
    "await anext(aiter(counter.get.submit()))": Check("_[1] == 0"),
    "[*counter[0].values.stream(3)]": Check("_ == [0, 1, 2]"),
    "[*counter[0].values.stream(3, ahead=1)]": Check("_ == [0, 1, 2]"),
    "counter.rows.sharded(x).result()": Check("torch.equal(_, x)", "x = torch.arange(8.0)"),
    "counter[0:2].get()": Check("_ == {0: 0, 1: 0}"),
    "counter[mesh.at(dp=1, tp=0).ranks].get()": Check("_ == 0"),
    'mesh.pull("rank")': Check("_.list == [0, 1, 2, 3]"),
    'counter.wait.submit("go")': Check(
        "counter.get().list == [0] * 4 and not _.done()", finally_="counter.let_go('go')"
    ),
    "[counter.add.submit(1).result() for _ in range(3)]": Check(
        "[each.list for each in _] == [[1] * 4, [2] * 4, [3] * 4]"
    ),
    "run.cancel()": Check("_ and run.wait(60)", "run = counter.wait.submit('never')"),
    "counter.get().list": Check("_ == [0] * 4"),
    'mesh.pull("counter.value", reduce="sum")': Check("_ == 0"),
    'mesh.cell("counter.value += 1")': Check("counter.get().list == [1] * 4"),
    "mesh.run(lambda actor: actor.get(), counter)": Check("_.list == [0] * 4"),
    "other.spawn(Client, counter[3]).ask()": Check(
        "_.list == [0, 0]", "other = borrowed", "other.drop(other.actors['client'])"
    ),
    "other.spawn(Client, counter[3]).read()": Check(
        "_.list == [[0, 1, 2]] * 2", "other = borrowed", "other.drop(other.actors['client'])"
    ),
    "other.spawn(Client, counter).share(x)": Check(
        "torch.equal(_[0], x) and torch.equal(_[1], x)",
        "other = borrowed; x = torch.arange(8.0)",
        "other.drop(other.actors['client'])",
    ),
    "mesh.redefine(counter, Better)": Check(
        "counter.get().list == [-5] * 4",
        "counter.add(5)\nclass Better(Counter):\n    def get(self):\n        return -self.value",
    ),
    'mesh.actors["counter"]': Check("_.get().list == [0] * 4"),
    "mesh.drop(counter)": Check("mesh.actors == {}"),
    # tensors
    "mesh.push(x=x)": Check(
        "mesh.pull('x.sum().item()').list == [28.0] * 4", "x = torch.arange(8.0)"
    ),
    'mesh.cell("y = x * 2")': Check("mesh.pull('y').list == [6] * 4", "mesh.push(x=3)"),
    'await mesh.copy("model", to=other, into="model")': Check(
        "torch.equal(other[1].pull('model.weight'), mesh[0].pull('model.weight'))",
        f"{MODEL}; {OTHER}",
    ),
    'link = cm.link(mesh, other, name="weights")': Check(
        "other[0].run(lambda: __import__('cellmesh').group('weights').size()) == 6",
        OTHER,
        "link.drop()",
    ),
    'mesh.inspect("model.weight")': Check("_[3].norm > 0", MODEL),
    # failures
    "counter.fail()": Check("isinstance(error, cm.RankFailure) and counter.get().list == [0] * 4"),
    "mesh.run(fail_on_one)": Check(
        "isinstance(error, cm.RankFailure) and mesh.run(sum_of_ones).list == [4.0] * 4",
    ),
    "mesh.heal()": Check(
        "mesh.pull(\"globals().get('kept')\").list == [0, 1, 2, None]",
        "mesh.cell('kept = rank')\n"
        "mesh[3].submit_cell('import os; os.kill(os.getpid(), 9)').wait(60)",
    ),
    # code
    'mesh.cell("y = rank + 1")': Check("mesh.pull('y').list == [1, 2, 3, 4]"),
    "mesh.run(lambda: rank)": Check("_.list == [0, 1, 2, 3]"),
    "mesh.submit(lambda: rank)": Check("_.result(60).list == [0, 1, 2, 3]"),
    "mesh.cell(\"print('ready')\")": Check("shown().count('ready') == 1"),
    "mesh.states()": Check("set(_) <= {0, 1, 2, 3}"),
}

# Lines that other tests execute.
_ATTACH = "tests/mesh/test_attach.py::test_a_mesh_can_be_left_and_attached_again_in_one_process"
ELSEWHERE = {
    'cm.start(launch="slurm", nodes=2)': (
        "tests/hosts/test_slurm.py::test_mesh_asks_for_nodes_and_gives_them_back"
    ),
    'cm.attach("train")': _ATTACH,
    "mesh.detach()": _ATTACH,
    "counter.fail.send()": (
        "tests/mesh/test_actors.py::test_a_failure_is_raised_once_and_of_a_send_shown"
    ),
    'mesh.spawn(Counter, on_death="restart")': (
        "tests/mesh/test_supervision.py::test_an_actor_is_made_again_three_times_within_a_minute"
    ),
    "mesh.interrupt()": "tests/mesh/test_stopping.py::test_each_way_to_stop_is_a_consistent_one",
    "mesh.reload()": "tests/mesh/test_reload.py::test_objects_go_on_with_the_new_code",
    'mesh.cell("breakpoint()")': (
        "tests/mesh/test_prompts.py::test_one_rank_is_debugged_while_the_others_wait"
    ),
    'mesh.cell("%run script.py")': (
        "tests/mesh/test_output.py::test_a_traceback_of_ipython_and_a_status_fail_the_cell"
    ),
}


def cells() -> list[str]:
    """Return the last cell of each row of the tables."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        rows = re.findall(r"^\| (.+) \|$", text, re.M)
        found += [row.rpartition(" | ")[2] for row in rows if not row.endswith("| here")]
    return found


def line_of(cell: str) -> str:
    """Return the line of code that a cell begins with; "" if it has none."""
    match = re.match(r"`([^`]+)`", cell)
    return match[1] if match else ""
