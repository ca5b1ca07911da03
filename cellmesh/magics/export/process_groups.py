"""Lets cells that make process groups or spawn processes run in an exported script. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MAKES = re.compile(r"\b(?:init|destroy)_process_group\b")
_SPAWNS = re.compile(r"\b(?:spawn|forkserver)\b")
_NAMES_A_STORE = re.compile(
    r"""MASTER_PORT(?:["']\s*\])?\s*=(?!=)|["']MASTER_PORT["']\s*:|tcp://"""
)


@dataclass(frozen=True)
class GroupUse:
    """Whether cells make process groups of their own, choose their rendezvous, or spawn processes.

    Attributes:
        makes: they make or destroy the default group.
        names_a_store: they say where processes meet, which is not torchrun's store.
        spawns: they start processes that import the script.
    """

    makes: bool = False
    names_a_store: bool = False
    spawns: bool = False


def find_group_use(sources: Iterable[str]) -> GroupUse:
    """Return what cells do with process groups, by the names in them."""
    text = "\n".join(sources)
    return GroupUse(
        *(pattern.search(text) is not None for pattern in (_MAKES, _NAMES_A_STORE, _SPAWNS))
    )


def write_group_use(use: GroupUse, has_mesh: bool) -> str:
    """Write the code that lets cells call ``init_process_group`` in a script that has a process
    group already.

    torch numbers groups from 0 again after the default one was destroyed: the next one would read
    the addresses that the last one has left in torchrun's store, so that one of a few runs fails.

    Args:
        use: what cells do.
        has_mesh: cells use the script's `mesh`, which must belong to the group that there is.
    """
    adoption = _ADOPTION + (_MESH if has_mesh else "") + _END if use.makes else ""
    return adoption + (_OWN_STORE if use.names_a_store else "")


_ADOPTION = '''

def adopt_process_group(rank: int, world_size: int) -> None:
    """Cells that make the process group find the one above, or make one after they destroyed it."""
    store, *_ = next(dist.rendezvous("env://"))
    make_group, numbers = dist.init_process_group, itertools.count()

    def init_process_group(backend=None, init_method=None, **options) -> None:
        if dist.is_initialized():
            return
        meeting = {"store": dist.PrefixStore(f"cells/{next(numbers)}", store)}
        make_group(backend, **{"rank": rank, "world_size": world_size, **meeting, **options})
'''
_MESH = """        global mesh
        mesh = init_device_mesh(mesh.device_type, mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
"""
_END = """
    dist.init_process_group = init_process_group


adopt_process_group(rank, world_size)
"""
_OWN_STORE = """\
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # cells name a store, which rank 0 is to serve
"""
