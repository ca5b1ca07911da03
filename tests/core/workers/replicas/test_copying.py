"""The names of a rank: which can be copied, why others cannot, and what arrives."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cellmesh.wire import payload
from cellmesh.workers.replicas.copying import gather, survey


def _new_main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    vars(module).update(torch=torch)  # as every rank has by itself
    return vars(module)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A rank's namespace; what is loaded finds it as ``__main__``, as it would find the new
    rank's.
    """
    return _new_main(monkeypatch)


def run(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "<cell>", "exec"), namespace)


Copy = Callable[..., dict[str, Any]]


@pytest.fixture
def copied(namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Copies names, all by default; returns the namespace of another rank where they arrive."""

    def copy(names: list[str] | None = None) -> dict[str, Any]:
        pickled, buffers = gather(namespace, survey(namespace)[0] if names is None else names)
        # As they come from a socket: read-only, and in memory of their own.
        frames = [bytes(buffer) for buffer in buffers]
        there = _new_main(monkeypatch)
        there.update(payload.loads(pickled, frames))
        return there

    return copy


# ---- what can be copied


CLASS = "class C:\n    def __init__(self): self.inner = threading.Lock()\n"
CANNOT = [
    ("x = threading.Lock()", "cannot pickle '_thread.lock'"),
    ("x = open('/dev/null')", "an open file"),
    (f"{CLASS}x = C()", "x.inner is what cannot"),
]


@pytest.mark.parametrize(("source", "why"), CANNOT, ids=[why for _, why in CANNOT])
def test_uncopyable_value_has_a_reason(source: str, why: str, namespace: dict[str, Any]) -> None:
    run(f"import threading\n{source}", namespace)
    names, reasons = survey(namespace)
    getattr(namespace["x"], "close", int)()
    assert "x" not in names
    assert why in reasons["x"]


# ---- what arrives


def test_a_model_and_its_optimizer_stay_together(namespace: dict[str, Any], copied: Copy) -> None:
    run(
        """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(300, 300)
    def forward(self, x):
        return scale * self.layer(x)
scale = 2.0
net = Net()
optimizer = torch.optim.Adam(net.parameters())
def step():
    optimizer.zero_grad()
    loss = net(torch.ones(1, 300)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()
step()
""",
        namespace,
    )
    there = copied()
    assert there["net"] is not namespace["net"]
    assert there["optimizer"].param_groups[0]["params"][0] is there["net"].layer.weight
    assert type(there["net"]) is there["Net"]
    # The functions of cells see the names of where they are now.
    assert there["step"].__globals__ is there
    assert [there["step"]() for _ in range(3)] == [namespace["step"]() for _ in range(3)]
    there["scale"] = 0.0
    assert there["step"]() == 0.0


def test_tensors_that_share_memory_still_do(namespace: dict[str, Any], copied: Copy) -> None:
    whole = torch.arange(40_000.0).reshape(200, 200)
    namespace.update(
        whole=whole, row=whole[3], turned=whole.t(), small=torch.ones(2, dtype=torch.bfloat16)
    )
    there = copied()
    there["whole"].fill_(5.0)  # what arrives can be written
    assert there["row"][7] == 5.0
    assert there["turned"].stride() == whole.t().stride()
    assert whole[3, 7] == 607.0
    assert there["small"].dtype == torch.bfloat16


def test_tensors_of_all_kinds_arrive(namespace: dict[str, Any], copied: Copy) -> None:
    values = {
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(3), requires_grad=False),
        "loss": (torch.ones(2, requires_grad=True) * 3).sum(),
    }
    generator, array = torch.Generator().manual_seed(3), np.arange(20_000.0)[::-2]
    namespace.update(values, generator=generator, array=array)
    there = copied()
    for name, value in values.items():
        assert torch.equal(there[name].to_dense(), value.to_dense()), name
    assert not there["parameter"].requires_grad
    assert torch.equal(there["generator"].get_state(), generator.get_state())
    assert np.array_equal(there["array"], array)


def test_functions_keep_what_makes_them(namespace: dict[str, Any], copied: Copy) -> None:
    run(
        """
def outer(n):
    def count(k: int = 2, *, more=3) -> int:
        "Counts."
        return 0 if k < 0 else n + more + count(k - 1)
    return count
count = outer(10)
square = lambda x: x * factor
class Base:
    def who(self): return "base"
class Derived(Base):
    def who(self): return "derived of " + super().who()
thing = Derived()
""",
        namespace,
    )
    there = copied()
    there["factor"] = 4
    assert there["count"]() == namespace["count"]() == 39
    assert there["count"].__doc__ == "Counts."
    assert there["square"](3) == 12
    assert there["thing"].who() == "derived of base"
    assert isinstance(there["thing"], there["Base"])
