"""What a rank answers: beside its main thread nothing runs, else once; and there is always an
answer.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
import sys
import threading
import types
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

from cellmesh.wire import payload
from cellmesh.wire.inspect import (
    Histogram,
    Overview,
    Picture,
    Pixels,
    Refusal,
    ValueQuery,
    ValueSummary,
)
from cellmesh.wire.messages import Request
from cellmesh.workers.groups import model_reset
from cellmesh.workers.inspect.handler import InspectHandler
from cellmesh.workers.inspect.safe_read import DIRECT
from cellmesh.workers.inspect.static_eval import NeedsCode, follow
from cellmesh.workers.inspect.summary import overview
from cellmesh.workers.rank.control import ControlThread
from cellmesh.workers.rank.features import RankContext
from tests.support.inspected_ranks import looker
from tests.support.loud_values import RAN, Loud, LoudTensor, noting


def questions(expression: str, token: str = "") -> list[ValueQuery]:
    value = expression, "", token
    return [
        Overview(*value),
        Histogram(*value, low=0.0, high=1.0, num_bins=4),
        Picture(*value, dims=(0, 1), rows=(0, 2), cols=(0, 2), height=2, width=2),
        Overview(*value, grads=True),
    ]


# ---- evaluated once


def test_an_expression_is_run_once_and_asked_about_often() -> None:
    numbers = iter(range(100))
    rank = looker({"take": lambda: torch.full((2, 2), float(next(numbers)), requires_grad=True)})
    found = rank.answer(Overview("take()", token="a", runs=True), False)
    assert (found.items[0].min, found.items[0].max) == (0.0, 0.0)
    answers = [rank.answer(subject, False) for subject in questions("take()", "a")]
    assert not [answer for answer in answers if isinstance(answer, Refusal)]
    assert answers[0].items[0].max == 0.0
    assert answers[1] == (4, 0, 0, 0)
    # Also while something runs: it is no path, but its value is there.
    assert isinstance(rank.answer(questions("take()", "a")[2], True), Pixels)
    assert next(numbers) == 1


def test_expression_is_not_run_without_consent() -> None:
    rank = looker({"take": lambda: RAN.append("take")})
    RAN.clear()
    for subject in questions("take()"):
        refusal = rank.answer(subject, False)
        assert refusal.needs_code
        assert "would have to run code" in refusal.text
    refusal = rank.answer(Overview("take()", token="a", runs=True), True)
    assert "the rank is busy" in refusal.text
    assert not rank.answer(Overview("gone"), False).needs_code
    assert RAN == []


def test_only_the_last_evaluated_value_is_kept() -> None:
    class Value:
        def __init__(self) -> None:
            made.add(self)

    made: weakref.WeakSet[Any] = weakref.WeakSet()
    rank = looker({"make": Value})
    for token in "ab":
        rank.answer(Overview("make()", token=token, runs=True), False)
        assert len(made) == 1
    refusal = rank.answer(Overview("make()", token="a"), False)
    assert "no longer kept: inspect it again" in refusal.text
    assert isinstance(rank.answer(Overview("make()", token="b"), True), ValueSummary)


# ---- nothing runs beside


class LoudMapping(collections.abc.Mapping[str, int]):
    __getitem__ = noting("getitem", 1)
    __iter__ = noting("iter", iter("ab"))
    __len__ = noting("len", 2)


class LoudDict(dict[str, Any]):
    items, __iter__ = noting("items", ()), noting("iter", iter(()))
    __getitem__, __missing__ = noting("getitem", 4), noting("missing", 5)
    __getattr__ = noting("getattr", 6)


class LoudModule(nn.Linear):
    extra_repr = noting("extra_repr", "")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        RAN.append("named_parameters")
        return super().named_parameters(*args, **kwargs)


class LoudOptimizer(torch.optim.SGD):
    param_groups = property(noting("param_groups", []), lambda self, groups: None)
    add_param_group: Any = lambda self, param_group: None


class OwnTensor(torch.Tensor):
    shape = property(noting("shape", torch.Size([7])))  # type: ignore[assignment]


@dataclasses.dataclass
class LoudData:
    field: int = 0

    def __getattribute__(self, name: str) -> Any:
        RAN.append(f"getattribute {name}")
        return object.__getattribute__(self, name)


def loud_values() -> dict[str, Any]:
    model = LoudModule(2, 2)
    return {
        "object": Loud(),
        "list": [Loud(), 3],
        "set": {Loud(), Loud()},
        "keys": {Loud(): 1, Loud(): torch.ones(2)},
        "mapping": LoudMapping(),
        "dict": LoudDict(a=torch.ones(2)),
        "module": model,
        "modules": nn.Sequential(model, LoudModule(1, 1)),
        "optimizer": LoudOptimizer(model.parameters(), lr=0.5),
        "tensor": torch.ones(2, 2).as_subclass(LoudTensor),
        "parameter": nn.Parameter(torch.ones(2, 2)).as_subclass(LoudTensor),
        "own": torch.ones(2, 2).as_subclass(OwnTensor),
        "data": LoudData(),
        "nested": {"deep": [(Loud(), LoudData(), LoudMapping())]},
        "big": 10**5000,
    }


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("name", list(loud_values()))
def test_no_code_of_the_users_runs(name: str, is_beside: bool) -> None:
    if name == "own" and not is_beside:
        return  # what a tensor has by code of its class is asked where nothing else runs
    rank = looker({"x": loud_values()[name]})
    RAN.clear()
    answers = [rank.answer(subject, is_beside) for subject in questions("x")]
    pickle.dumps(answers)
    assert RAN == []
    assert isinstance(answers[0], ValueSummary)


# ---- there is an answer


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


class EndsWhenTold(Exception):
    def __str__(self) -> str:
        sys.exit(1)


class OwnText(str):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def raise_(error: BaseException) -> None:
    raise error


def test_any_exception_is_an_answer() -> None:
    names = {"ends": Raises(SystemExit(1)), "stops": Raises(KeyboardInterrupt()), "own": OwnText()}
    rank = looker(names | {"raise_": raise_, "E": EndsWhenTold})
    assert [rank.answer(Overview(name), False).text for name in names] == [
        "<Raises>", "<Raises>", "<OwnText>",
    ]  # fmt: skip
    for code, refusal in (
        ("raise_(E())", Refusal("EndsWhenTold", "<its str() raised SystemExit>")),
        ("raise_(SystemExit(3))", Refusal("SystemExit", "3")),
    ):
        assert rank.answer(Overview(code, runs=True), False) == refusal


def test_the_user_interrupts_what_is_run_for_a_look() -> None:
    with pytest.raises(KeyboardInterrupt):
        looker({"raise_": raise_}).answer(Overview("raise_(KeyboardInterrupt())", runs=True), False)


@pytest.mark.parametrize("answer", [raise_, lambda error: threading.Lock()])
def test_the_control_thread_answers_always_and_as_beside(answer: Any) -> None:
    asked: list[bool] = []

    class Odd:
        def handle_beside(self, request: Any) -> Any:
            asked.append(True)
            return answer(KeyboardInterrupt("odd"))  # raised, or in what cannot be pickled

    context = SimpleNamespace(shell=None, groups=None, interrupts=SimpleNamespace(), device=None)
    context.find_handler = lambda request: Odd()
    parts = cast(Any, [None, context, None, None])
    done = ControlThread(*parts)._query(Request(7, Overview("x")))
    assert done.verb.run == 7
    assert isinstance(payload.loads(done.verb.payload, done.buffers), Refusal)
    assert asked == [True]


@pytest.mark.parametrize(
    ("running", "begun", "is_torn"), [(-1, 0, False), (-1, 1, True), (4, 0, True), (4, 1, True)]
)
def test_only_values_read_during_a_run_are_torn(running: int, begun: int, is_torn: bool) -> None:
    class Slow(InspectHandler):
        def answer(self, subject: Any, is_beside: bool) -> Any:
            assert is_beside
            interrupts.num_begun += begun
            return super().answer(subject, is_beside)

    interrupts = SimpleNamespace(running=running, num_begun=5)
    shell = SimpleNamespace(user_ns={"x": torch.ones(1)})
    handler = Slow(cast(Any, SimpleNamespace(shell=shell, interrupts=interrupts)))
    assert handler.handle_beside(Overview("x")).is_torn is is_torn


@pytest.mark.parametrize(("runs", "is_dirty"), [(True, True), (True, False), (False, True)])
def test_an_expression_that_raises_in_the_middle_of_a_step_leaves_models_to_be_reset(
    monkeypatch: pytest.MonkeyPatch, runs: bool, is_dirty: bool
) -> None:
    monkeypatch.setattr(model_reset, "look_after_failure", lambda: is_dirty)
    shell: Any = SimpleNamespace(user_ns={"raise_": raise_})
    passes = SimpleNamespace(look=lambda tb: None)
    groups: Any = SimpleNamespace(is_half_done=False, backward_passes=passes)
    nothing: Any = None
    handler = InspectHandler(RankContext(shell, groups, nothing, nothing, nothing))
    answer = handler.handle(Overview("raise_(ValueError())", runs=runs), ())
    assert isinstance(answer, Refusal)
    assert groups.is_half_done is (runs and is_dirty)


# ---- paths lead to the value that Python gives


class Sly:
    __getattribute__ = noting("getattribute", 1)


class Slotted:
    __slots__ = ("here", "not_yet")

    def __init__(self) -> None:
        self.here = 5


@dataclasses.dataclass
class Config:
    rate: float = 0.5
    limit: ClassVar[None] = None


Pair = collections.namedtuple("Pair", "left right")


def names() -> dict[str, Any]:
    loud = Loud()
    tensor = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensor.sum().backward()
    return {
        "x": tensor,
        "i": 1,
        "key": "b",
        "array": np.arange(6).reshape(2, 3),
        "model": nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(1, 1)})),
        "lists": nn.ParameterList([torch.ones(1), torch.ones(2)]),
        "dicts": nn.ParameterDict({"p": torch.ones(1)}),
        "optimizer": torch.optim.SGD([tensor], lr=0.5),
        "nest": {"a": [10, (20, 30)], "b": {1: "one", (0, 1): "pair"}, None: 7},
        "ordered": collections.OrderedDict(a=1),
        "makes": collections.defaultdict(list, a=[1]),
        "pair": Pair(1, [2]),
        "config": Config(),
        "slotted": Slotted(),
        "module": types.SimpleNamespace(inner=sys),
        "text": "text",
        "size": torch.Size([2, 3]),
        "loud": loud,
        "sly": Sly(),
        "loud_dict": LoudDict(a=1),
        "loud_keys": {loud: 1, "b": 2},
        "loud_tensor": torch.ones(2).as_subclass(LoudTensor),
        "loud_class": Loud,
    }


@pytest.mark.parametrize(
    "expression",
    [
        "x", " x ", "x[0]", "x[-1, 2:]", "x[..., None]", "x[i]", "x[:, 1:3]", "x.grad",
        "x.grad[0]", "x.T",
        "x.shape", "x.requires_grad", "array[0]", "array[:, 1]", "model[0].weight",
        "model[-1]['a'].bias[0]", "model[0].in_features", "model.training", "lists[0]", "lists[-1]",
        "dicts['p']", "dicts.p", "optimizer.param_groups[0]['lr']",
        "optimizer.param_groups[0]['params'][0][1]", "nest['a'][1][0]", "nest[key][i]",
        "nest['b'][0, 1]",
        "nest[None]", "nest['a'][0:1]", "ordered['a']", "makes['a']", "pair[1][0]",
        "pair.right[0]", "config.rate", "config.limit", "Config.limit", "Config",
        "slotted.here", "module.inner.path", "text[0]", "size[1]", "size[0:1]", "loud.held",
        "loud.kind",
        "loud_class.kind", "loud_class.__init__", "print", "3",
    ],
)  # fmt: skip
def test_a_path_leads_to_the_value_that_python_gives(expression: str) -> None:
    space = {**names(), "Config": Config}
    RAN.clear()
    found = follow(expression, space)
    assert RAN == []
    wanted = eval(expression.strip(), space)
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor | np.ndarray):
        assert found.shape == wanted.shape
        assert bool((found == wanted).all())
    else:
        assert found is wanted or found == wanted


@pytest.mark.parametrize(
    "expression",
    [
        "loud.weight", "loud.nothing", "loud[0]", "sly.any", "loud_dict['a']", "loud_dict.a",
        "loud_keys['a']", "loud_tensor[0]", "loud_tensor.T", "loud_class.weight", "makes['b']",
        "f()", "x.sum()", "x.sum",
        "x + 1", "[x]", "x[x > 0]", "x[[0, 1]]", "x[True]", "x[loud]", "model[0:1]", "lists[0:1]",
        "nest[loud]", "nest[x[0]]", "slotted.__class__", "f'{x}'", "lambda: x", "x if i else i",
        "x; i", "",
        "x.", "(y := x)", "await x", "*x", "optimizer.state[x]", "loud.__dict__",
        "x" + "[0]" * 5000,
    ],
)  # fmt: skip
def test_expression_that_needs_code_is_reported_and_not_run(expression: str) -> None:
    space = names()
    RAN.clear()
    with pytest.raises(NeedsCode) as caught:
        follow(expression, space)
    assert RAN == []
    assert str(caught.value)
    assert list(space["makes"]) == ["a"]


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("gone", NameError), ("x.gone", AttributeError), ("model.gone", AttributeError),
        ("slotted.not_yet", AttributeError), ("nest['gone']", KeyError),
        ("nest['a'][9]", IndexError),
        ("x[7]", IndexError), ("lists[2]", IndexError), ("config.gone", AttributeError),
        ("model[1]['gone']", KeyError),
    ],
)  # fmt: skip
def test_missing_name_gives_pythons_error(expression: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        follow(expression, names())


def test_a_gradient_that_is_not_kept_is_said_to_be_none_and_torch_does_not_warn() -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensor, kept = leaf * 2, leaf * 3
    kept.retain_grad()
    (tensor + kept).sum().backward()
    space = {"leaf": leaf, "tensor": tensor, "kept": kept, "parts": {"tensor": tensor}}
    with pytest.raises(AttributeError, match="no leaf"):
        follow("tensor.grad", space)
    assert follow("leaf.grad", space) is leaf.grad
    assert follow("kept.grad", space) is kept.grad
    model = nn.Linear(3, 1)
    model._parameters["weight"] = tensor  # type: ignore[assignment]  # as torch's functional calls do
    found = overview(model, Overview("model", grads=True), DIRECT)
    assert [(item.path, item.text) for item in found.items] == [("bias.grad", "None")]
