"""What each rank would do the first time, done once in a zygote: importing this module renders a
traceback, looks up what a step on sharded parameters needs, and reads the files whose lines its
stacks quote.

It is one of the modules that a zygote imports in a copy of itself (`preload`), which is lost if
this raises, draws random numbers, starts a thread or uses CUDA. A step asks a build of torch with
CUDA whether there are GPUs, which no process may do that is forked later: there, it is left out.
"""

from __future__ import annotations

import linecache
import sys

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .rank.shell import RankShell, remember_error

_QUOTED = ("cellmesh.", "torch.distributed.fsdp._fully_shard.")


def _step() -> None:
    """Step on a parameter that is sharded over a mesh of this process alone, which needs no process
    group. Its dim has a name of its own: DTensor has the results cached for equal meshes.
    """
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=(__name__,), _init_backend=False, _rank=0)
    weight, gradient = (
        DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False) for _ in range(2)
    )
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    torch.optim.AdamW([parameter]).step()


def _render_traceback() -> None:
    """Render a first traceback, which takes ten times as long as others."""
    error = RankShell.instance().run_source("raise ValueError")
    assert error is not None
    RankShell.instance().render_traceback(error)
    remember_error(None)


_render_traceback()
if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    _step()
# torch takes the stack for each operation whose shapes are new to it, in ranks of 40 frames.
for name, module in list(sys.modules.items()):
    if name.startswith(_QUOTED) and (file := getattr(module, "__file__", None)):
        linecache.getlines(file)
