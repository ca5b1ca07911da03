"""Objects whose code raises, lies or never ends, looked at in every way there is: the rank stays as
it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.inspect import inspect, look
from cellmesh.wire.inspect import Complete, Explain, Names, Overview
from cellmesh.wire.replicas import SurveyNames

WAIT_S = 40.0

# Each binds `x` on the rank; those that raise leave their exception as the cell's failure.
OBJECTS = {
    "getattr recurses": "class X:\n    def __getattr__(self, name): return self.nothing\nx = X()",
    "getattr ends": "class X:\n    def __getattr__(self, name): raise SystemExit(3)\nx = X()",
    "getattr interrupts": "class X:\n    def __getattr__(self, name): "
"raise KeyboardInterrupt\nx = X()",
    "getattr gives itself": (
        "class X:\n    def __getattr__(s, name): return s\n    __call__ = lambda s, *a, **k: s\nx "
        "= X()"
    ),
    "getattribute": "class X:\n    def __getattribute__(self, name): "
"raise BaseException(name)\nx = X()",
    "class raises": "class X:\n    __class__ = property(lambda self: 1 / 0)\nx = X()",
    "class lies": "class X:\n    __class__ = property(lambda self: torch.nn.Module)\nx = X()",
    "class lies of a tensor": "class X:\n    __class__ = torch.Tensor\nx = X()",
    "dict raises": "def no(self): raise SystemExit\nclass X: __dict__ = property(no)\nx = X()",
    "all operators raise": (
        "def no(*args): raise SystemExit('no')\nnames = '__eq__ __ne__ __lt__ __bool__ __hash__ "
        "__len__ __iter__ __contains__ __getitem__ __str__ __repr__ __format__ __int__ __float__ "
        "__index__ __reduce_ex__ __reduce__ __sizeof__ __dir__ __array__ __del__ __call__ "
        "__enter__ __next__ __copy__ __deepcopy__ _repr_html_'\nx = type('X', (), "
        "dict.fromkeys(names.split(), no))()"
    ),
    "repr is no text": "class X:\n    def __repr__(self): return 3\nx = X()",
    "repr recurses": "class X:\n    def __repr__(self): return repr(self)\nx = X()",
    "repr is long": "class X:\n    def __repr__(self): return 'x' * 100_000_000\nx = X()",
    "html lies": "class X:\n    _repr_mimebundle_ = lambda s, **k: "
"{'text/html': object(), 3: X}\nx = X()",
    "metaclass": (
        "class Meta(type):\n    __module__ = property(lambda cls: 1 / 0)\n    __name__ = "
        "property(lambda cls: 1 / 0)\n    __qualname__ = property(lambda cls: 1 / 0)\n    __mro__ "
        "= property(lambda cls: 1 / 0)\n    def __instancecheck__(cls, other): raise SystemExit\n "
        "   def __subclasscheck__(cls, other): raise SystemExit\n    def __repr__(cls): raise "
        "SystemExit\n    def __getattribute__(cls, name): raise SystemExit\n    def __eq__(cls, "
        "other): raise SystemExit\n    def __hash__(cls): raise SystemExit\nx = Meta('X', (), "
        "{})()\ndel x\nx = Meta.__call__(Meta('X', (), {}))"
    ),
    "names of classes": "class X: pass\nX.__module__ = 3; X.__qualname__ "
"= 'a' * 1_000_000\nx = X()",
    "half a module": (
        "class X(torch.nn.Module):\n    def __init__(self):\n        global x; x = self\n        "
        "1 / 0\nX()"
    ),
    "module whose parts lie": "x = torch.nn.Linear(2, 2); x._parameters = 7; x._modules = [x]",
    "module of itself": "x = torch.nn.Sequential(torch.nn.Linear(2, 2))\nx.again = x",
    "half a DDP": (
        "from torch.nn.parallel import DistributedDataParallel as D\nx = D.__new__(D)\n"
        "y = D.__new__(D); y.__dict__['reducer'] = 3"
    ),
    "half an FSDP1": (
        "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
        "x = F.__new__(F); y = F.__new__(F); torch.nn.Module.__init__(y)\n"
        "z = F.__new__(F); z.__dict__['_is_root'] = True\n"
        "F(torch.nn.Linear(2, 2), process_group=mesh.get_group())"
    ),
    "half an FSDP2": (
        "from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as S\n"
        "x = S.__new__(S); y = S.__new__(S); y._is_root = True"
    ),
    "half a pipeline": (
        "from torch.distributed.pipelining.schedules import _PipelineSchedule as P, ScheduleGPipe "
        "as G\nx = G.__new__(G); y = G.__new__(G); y._stages = 3; z = G.__new__(G); z._stage = z"
    ),
    "a model that refuses": (
        "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
        "class X(F):\n    def __init__(self): self.__dict__['_is_root'] = True\n"
        "    def __getattr__(self, name): raise SystemExit\n"
        "    named_parameters = property(lambda self: 1 / 0)\nx = X()"
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
    "an error with a long text": "x = type('X' * 10_000_000, (Exception,), "
"{})('y' * 100_000_000)\nraise x",
    "an error of strange parts": (
        "class X(RuntimeError):\n    args = property(lambda self: 1 / 0)\n    __traceback__ = 3\n "
        "   __cause__ = property(lambda self: 1 / 0)\n    __context__ = property(lambda self: "
        "self)\n    __notes__ = property(lambda self: 1 / 0)\n    __suppress_context__ = "
        "property(lambda self: 1 / 0)\n    add_note = None\nx = X()\nraise x"
    ),
    "an error that cannot be made": (
        "class X(Exception):\n    def __new__(cls, *args): raise SystemExit\nx = 1\nraise X"
    ),
    "an error of a hostile class": (
        "class M(type):\n    def __getattribute__(cls, name): raise SystemExit\n"
        "    __name__ = property(lambda cls: 1 / 0)\n    def __repr__(cls): raise SystemExit\n"
        "class X(Exception, metaclass=M): pass\nx = Exception.__new__(X)\nraise x"
    ),
    "a deep group": (
        "x = ValueError(1)\nfor _ in range(3000): x = ExceptionGroup('g', [x])\nraise x"
    ),
    "a circle of causes": "x = ValueError(1); y = KeyError(2); x.__cause__ "
"= y; y.__cause__ = x\nraise x",
    "a long chain": (
        "x = ValueError(0)\nfor i in range(5000):\n    y = ValueError(i); y.__context__ = x; x = "
        "y\nraise x"
    ),
    "an error while it is pickled": (
        "class X(Exception):\n    def __reduce__(self): raise SystemExit\nx = X()\nraise x"
    ),
    "an error that pickles to nothing": (
        "class X(Exception):\n    def __reduce__(self): return int, ('no number',)\nx = "
        "X()\nraise x"
    ),
    "memory": "x = None\nraise MemoryError",
    "top of the stack": "def x(): x()\nx()",
    "exit": "x = SystemExit\nraise SystemExit(3)",
    "generator exit": "x = GeneratorExit()\nraise x",
    "objects that the collector finds": (
        "class X:\n    __class__ = property(lambda s: 1 / 0)\n"
        "    def __getattribute__(s, n): raise SystemExit\n"
        "    def __eq__(s, o): raise SystemExit\n    __hash__ = None\n"
        "x = [X() for _ in range(100)]; x.append(x)\n"
        "y = type(torch)('y'); y.__dict__.clear()\nraise ValueError"
    ),
    "a module named by an object": (
        "class N:\n    def __str__(self): raise SystemExit\n"
        "__name__ = N()\ndef x(): 1 / 0\nx()"
    ),
    "modules that lie": (
        "import sys\nclass M:\n    def __getattr__(self, name): raise SystemExit\n"
        "x = M(); sys.modules['hostile'] = x; sys.modules['none'] = None\nraise ValueError"
    ),
}  # fmt: skip


def last_expression(ranks: Any) -> None:
    ranks.submit_cell("x").result(timeout_s=WAIT_S)


def raised_again(ranks: Any) -> None:
    ranks.submit_cell(
        "raise (x if type.__instancecheck__(BaseException, x) else ValueError(x))"
    ).result(timeout_s=WAIT_S)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "shown": last_expression,
    "raised": raised_again,
    "pulled": lambda ranks: ranks.pull("x"),
    "returned": lambda ranks: ranks.submit(eval("lambda: x", {})).result(timeout_s=WAIT_S),
    "raised in a call": lambda ranks: ranks.submit(
        eval("lambda: (_ for _ in ()).throw(x)", {})
    ).result(WAIT_S),
    "inspected": lambda ranks: inspect(ranks.rank_set, "x"),
    "inspected beside": lambda ranks: look(ranks.rank_set, Overview("x"), is_beside=True),
    "run for a look": lambda ranks: look(ranks.rank_set, Overview("(x, x)", token="a", runs=True)),
    "gradients": lambda ranks: look(ranks.rank_set, Overview("x", grads=True)),
    "completed": lambda ranks: look(ranks.rank_set, Complete("x.", 2), is_beside=True),
    "completed inside": lambda ranks: look(ranks.rank_set, Complete("x['", 3), is_beside=True),
    "explained": lambda ranks: (
        look(ranks.rank_set, Explain("x")),
        look(ranks.rank_set, Explain("x", 1), is_beside=True),
    ),
    "named": lambda ranks: (
        look(ranks.rank_set, Names()),
        look(ranks.rank_set, Names(), is_beside=True),
    ),
    "surveyed": lambda ranks: ranks.rank_set.start(SurveyNames()).result(timeout_s=WAIT_S),
    "checked": lambda ranks: (ranks.check("x"), ranks.check()),
    "synced": lambda ranks: ranks.mesh_of.sync("x"),
    "saved": lambda ranks: ranks.mesh_of.save("x", path=ranks.path),
    "states": lambda ranks: (ranks.states(), ranks.stacks(all_threads=True)),
    "debugged": lambda ranks: ranks.submit_cell("import sys; repr(sys.last_value)").result(WAIT_S),
}


def quietly(look_at: Callable[[], Any]) -> BaseException | None:
    try:
        look_at()
    except Exception as error:
        # Of the rank, or of a value that was pulled and is not to be had here.
        return error
    return None


@pytest.mark.parametrize("name", OBJECTS)
def test_no_object_harms_a_rank(name: str, quick: cm.Mesh, tmp_path: Path) -> None:
    pids = quick.run(os.getpid).list
    ranks: Any = quick[[1]]
    ranks.mesh_of, ranks.path = quick, str(tmp_path / "saved")
    found = {"made": quietly(lambda: ranks.submit_cell(OBJECTS[name]).result(timeout_s=WAIT_S))}
    for way, look_at in LOOKS.items():
        found[way] = quietly(lambda look_at=look_at: look_at(ranks))
    for way, error in found.items():
        assert not isinstance(error, cm.RankDied | TimeoutError), (way, error)
    quick.cell("x = y = z = None; __name__ = '__main__'")
    quick.cell("import sys; [sys.modules.pop(name, None) for name in ('hostile', 'none')]")
    quick.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert quick.pull("t.item()").list == [2.0, 2.0]
    assert quick.run(os.getpid).list == pids
