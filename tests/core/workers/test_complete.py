"""Completions and help that a rank answers with from its namespace."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from torch import nn
from traitlets.config import Config

from cellmesh.wire.inspect import Complete, Completions, Explain
from cellmesh.workers.complete import CompletionHandler, complete, explain
from cellmesh.workers.rank.shell import RankShell


def never(*args: object) -> NoReturn:
    raise AssertionError("the user's code ran")


class Net(nn.Module):
    """A net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
        self.parts = nn.ModuleDict({"head": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Go forward."""
        return never()

    @property
    def made(self) -> dict[str, int]:
        """How it was made."""
        return never()


class Trapped:
    """Has code of its own for attributes and items."""

    held: ClassVar = {"key": 1}
    __getattr__ = __getitem__ = __repr__ = never


class Waiting:
    """Completion of it waits until it is let go."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __dir__(self) -> list[str]:
        self.entered.set()
        self.let_go.wait()
        return ["found"]


def step(batch: object, lr: float = 0.1) -> Net:
    """Make a step."""
    return never()


@pytest.fixture(scope="module")
def shell() -> Any:
    model = Net()
    made = RankShell(config=Config(HistoryManager={"enabled": False}))
    made.user_ns.update(
        {
            "torch": torch, "nn": nn, "model": model, "state": model.state_dict(), "step": step,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "trapped": Trapped(),
            "nested": {"a b": {"inner": 1}, "it's": [1]}, "_hidden": 1, "Net": Net,
        }
    )  # fmt: skip
    return made


def ask(shell: Any, code: str, is_idle: bool = True) -> Completions:
    return complete(shell, Complete(code, len(code)), is_idle)


def offered(shell: Any, code: str) -> list[str]:
    """The code with each completion in it."""
    found = ask(shell, code)
    return [code[: found.begin] + text for text in found.texts]


@pytest.mark.parametrize(
    ("code", "completed"),
    [
        ("mod", "model"),
        ("model.la", "model.layers"),
        ("model.layers[-1].we", "model.layers[-1].weight"),
        ("print(model.parts['head'].bi", "print(model.parts['head'].bias"),
        ("x = 1\nfor i in broken(:\nmodel.la", "x = 1\nfor i in broken(:\nmodel.layers"),
        ("state['layers.1.b", "state['layers.1.bias"),
        ("nested['a b']['", "nested['a b']['inner"),
        ("optimizer.param_groups[0]['mom", "optimizer.param_groups[0]['momentum"),
        ("trapped.held['", "trapped.held['key"),
        ("_hid", "_hidden"),
    ],
)
def test_idle_rank_completes_what_it_holds(shell: Any, code: str, completed: str) -> None:
    assert completed in offered(shell, code)


@pytest.mark.parametrize("code", ["nothing.", "model.made.", "trapped.gone.", ""])
def test_completions_that_would_need_code_are_left_to_the_notebook(shell: Any, code: str) -> None:
    assert not ask(shell, code).is_whole


def test_busy_rank_completes_names_only(shell: Any) -> None:
    assert ask(shell, "print(mod", is_idle=False).texts == ("model",)
    assert "step" in ask(shell, "model(", is_idle=False).texts
    assert "_hidden" not in ask(shell, "", is_idle=False).texts
    for code in ("model.la", "state['", "model.layers[0].we"):
        assert ask(shell, code, is_idle=False).texts == ()


def test_stuck_completion_costs_attributes_and_not_a_second_thread(shell: Any) -> None:
    shell.user_ns["waiting"] = waiting = Waiting()
    context: Any = SimpleNamespace(shell=shell, interrupts=SimpleNamespace(running=-1))
    handler = CompletionHandler(context)
    request = Complete("waiting.fo", 10)
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(handler.handle_beside(request)))
    first.start()
    try:
        assert waiting.entered.wait(60)
        assert handler.handle_beside(request).texts == ()  # type: ignore[union-attr]
        assert handler.handle_beside(Complete("mod", 3)).texts == ("model",)  # type: ignore[union-attr]
    finally:
        waiting.let_go.set()
        first.join()
        del shell.user_ns["waiting"]
    assert answers[0].texts[0].endswith("found")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("step?", ["step(batch: 'object', lr: 'float' = 0.1)", "Make a step.", "test_complete.py"]),
        ("step??", ["def step(batch: object"]),
        ("model?", ["model(x: 'torch.Tensor', scale: 'float' = 1.0)", "A net.", "(0): Linear("]),
        ("model.forward?", ["Signature: model.forward(x: 'torch.Tensor'", "Go forward."]),
        ("model.made?", ["How it was made."]),
        ("trapped?", ["Has code of its own", "<Trapped>"]),
        ("len?", ["len(obj, /)"]),
    ],
)
def test_help_is_ipythons(shell: Any, name: str, parts: list[str]) -> None:
    coloured = explain(shell, Explain(name.rstrip("?"), name.count("?") - 1), is_idle=True)
    found = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    found = "\n".join(" ".join(line.split()) for line in found.splitlines())
    assert [part for part in parts if part not in found] == [], found


@pytest.mark.parametrize("name", ["nothing", "model.nothing", "model.made.x"])
def test_no_help_for_unknown_names(shell: Any, name: str) -> None:
    assert explain(shell, Explain(name), is_idle=True) == ""


def test_busy_rank_names_the_time_when_it_helps(shell: Any) -> None:
    assert "when no cell runs" in explain(shell, Explain("model.layers[0]"), is_idle=False)
    assert explain(shell, Explain("nothing"), is_idle=False) == ""
