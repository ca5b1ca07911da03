"""Objects whose code raises, lies or never ends, looked at in every way: the rank stays as it is.

The core's tests of `inspect`, `complete` and `replicas` have the single kinds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.inspect import inspect, look
from cellmesh.wire.inspect import Complete, Explain, Overview
from cellmesh.wire.replicas import SurveyNames

WAIT_S = 40.0

# Each binds `x` on the rank; those that raise leave their exception as the cell's failure.
OBJECTS = {
    "getattr gives itself": "class X:\n    def __getattr__(s, name): return s\n"
    "    __call__ = lambda s, *a, **k: s\nx = X()",
    "all operators raise": (
        "def no(*args): raise SystemExit('no')\nnames = '__eq__ __ne__ __lt__ __bool__ __hash__ "
        "__len__ __iter__ __contains__ __getitem__ __str__ __repr__ __format__ __int__ __float__ "
        "__index__ __reduce_ex__ __reduce__ __sizeof__ __dir__ __array__ __del__ __call__ "
        "__enter__ __next__ __copy__ __deepcopy__ _repr_html_'\n"
        "x = type('X', (), dict.fromkeys(names.split(), no))()"
    ),
    "repr is long": "class X:\n    def __repr__(self): return 'x' * 100_000_000\nx = X()",
    "metaclass": (
        "def no(*args): raise SystemExit\n"
        "class Meta(type):\n    __module__ = __name__ = __mro__ = property(no)\n"
        "    __instancecheck__ = __subclasscheck__ = __repr__ = __getattribute__ = no\n"
        "    __eq__ = __hash__ = no\nx = Meta.__call__(Meta('X', (), {}))"
    ),
    "module whose parts lie": "x = torch.nn.Linear(2, 2); x._parameters = 7; x._modules = [x]",
    "half a DDP and an FSDP1": (
        "from torch.nn.parallel import DistributedDataParallel as D\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
        "x = D.__new__(D); y = D.__new__(D); y.__dict__['reducer'] = 3\n"
        "z = F.__new__(F); z.__dict__['_is_root'] = True\n"
        "F(torch.nn.Linear(2, 2), process_group=mesh.get_group())"
    ),
    "a tensor that refuses": (
        "class X(torch.Tensor):\n"
        "    def __torch_function__(*a, **k): raise SystemExit\nx = torch.ones(2).as_subclass(X)"
    ),
    "an error without a text": (
        "def no(*args): raise SystemExit\nnames = '__str__ __repr__ __reduce_ex__ "
        "__getattribute__ __eq__ __hash__ __bool__ __init__'\nx = BaseException.__new__(type('X', "
        "(BaseException,), dict.fromkeys(names.split(), no)))\nraise x"
    ),
    "an error of strange parts": (
        "no = property(lambda self: 1 / 0)\nclass X(RuntimeError):\n    __traceback__ = 3\n"
        "    args = __cause__ = __notes__ = __suppress_context__ = no\n"
        "    __context__ = property(lambda self: self)\n    add_note = None\nx = X()\nraise x"
    ),
    "exit": "x = SystemExit\nraise SystemExit(3)",
    "objects that the collector finds": (
        "class X:\n    __class__ = property(lambda s: 1 / 0)\n"
        "    def __getattribute__(s, n): raise SystemExit\n"
        "    def __eq__(s, o): raise SystemExit\n    __hash__ = None\n"
        "x = [X() for _ in range(100)]; x.append(x)\n"
        "y = type(torch)('y'); y.__dict__.clear()\nraise ValueError"
    ),
}  # fmt: skip
RAISE = "raise (x if type.__instancecheck__(BaseException, x) else ValueError(x))"
LOOKS: dict[str, Callable[[Any], Any]] = {
    "shown": lambda ranks: ranks.submit_cell("x").result(WAIT_S),
    "raised": lambda ranks: ranks.submit_cell(RAISE).result(WAIT_S),
    "returned": lambda ranks: ranks.submit(eval("lambda: x", {})).result(WAIT_S),
    "inspected": lambda ranks: inspect(ranks.rank_set, "x"),
    "inspected beside": lambda ranks: look(ranks.rank_set, Overview("x"), is_beside=True),
    "run for a look": lambda ranks: look(ranks.rank_set, Overview("(x, x)", token="a", runs=True)),
    "completed": lambda ranks: look(ranks.rank_set, Complete("x.", 2), is_beside=True),
    "explained": lambda ranks: look(ranks.rank_set, Explain("x", 1), is_beside=True),
    "surveyed": lambda ranks: ranks.rank_set.start(SurveyNames()).result(timeout_s=WAIT_S),
    "checked": lambda ranks: (ranks.check("x"), ranks.check()),
    "synced": lambda ranks: ranks.mesh_of.sync("x"),
    "saved": lambda ranks: ranks.mesh_of.save("x", path=ranks.path),
}


def error_of(look_at: Callable[[], Any]) -> BaseException | None:
    """Of the rank, or of a value that was pulled and is not to be had here."""
    try:
        look_at()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", OBJECTS)
def test_no_object_harms_a_rank(name: str, quick: cm.Mesh, tmp_path: Path) -> None:
    pids = quick.run(os.getpid).list
    ranks: Any = quick[[1]]
    ranks.mesh_of, ranks.path = quick, str(tmp_path / "saved")
    found = {"made": error_of(lambda: ranks.submit_cell(OBJECTS[name]).result(timeout_s=WAIT_S))}
    for way, look_at in LOOKS.items():
        found[way] = error_of(lambda look_at=look_at: look_at(ranks))
    for way, error in found.items():
        assert not isinstance(error, cm.RankDied | TimeoutError), (way, error)
    quick.cell("x = y = z = None")
    quick.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert quick.pull("t.item()").list == [2.0, 2.0]
    assert quick.run(os.getpid).list == pids
