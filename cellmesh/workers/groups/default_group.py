"""Replaces ``init_process_group`` and ``destroy_process_group`` for the user's programs on a rank.

A rank has the mesh's default group from the start, and a program that asks for a group of the whole
mesh gets that one. A program that asks for another size or rank gets a default group of its own,
and the mesh's groups are set aside, as they are by ``destroy_process_group``. Groups that are set
aside stay connected and are healed; when a program asks for the whole mesh again, the same objects
are back in use.

torch looks up groups in registries, a set of dicts, and by names in C++. The mesh's groups and a
program's have separate registries (`World`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _unregister_all_process_groups,
    _unregister_process_group,
)

from .group_factory import TIMEOUT
from .program_calls import Call, ProgramCalls, read_call

torch_init_process_group = c10d.init_process_group
torch_destroy_process_group = c10d.destroy_process_group
_signature = inspect.signature(torch_init_process_group)
_of_rank: DefaultGroup | None = None
_inherited: list[Any] = []  # a forked process's groups of its parent, kept from destruction


_TorchsWorld: Any = c10d._World


class World(_TorchsWorld):  # type: ignore[misc]
    """A set of torch's registries of process groups; `use` makes torch work with it.

    Args:
        default: the default process group.
    """

    # Override properties of torch's class, which would be shared by all worlds.
    pg_map: Any = None
    pg_names = pg_group_ranks = pg_backend_config = pg_to_tag = tags_to_pg = group_count = pg_map

    def __init__(self, default: Any = None) -> None:
        super().__init__()
        self.default_pg = default
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.pg_to_tag, self.tags_to_pg = {}, {}, {}
        self.group_count = 0


def use(world: Any) -> None:
    """Make torch look up process groups in the registries of `world`; C++ names do not change."""
    c10d._world = world
    c10d._update_default_pg(world.default_pg)


def _register_names(world: Any) -> None:
    """Register the names of the groups in `world` in C++ again, after torch has dropped all names
    there.
    """
    for group, name in world.pg_names.items():
        _register_process_group(name, group)


def install() -> None:
    """Replace torch's ``init_process_group`` and ``destroy_process_group`` by those of this
    module; the zygote calls this before it preloads modules.
    """
    for module in (dist, c10d, device_mesh):
        if hasattr(module, "init_process_group"):
            vars(module)["init_process_group"] = init_process_group
    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group


def init_process_group(*args: Any, **kwargs: Any) -> None:
    owner = _of_this_process()
    if owner is None:
        torch_init_process_group(*args, **kwargs)
    else:
        asked = _signature.bind(*args, **kwargs)
        asked.apply_defaults()
        owner.init(asked.arguments)


def destroy_process_group(group: Any = None) -> None:
    owner = _of_this_process()
    if owner is None:
        torch_destroy_process_group(group)
    else:
        owner.destroy(group)


init_process_group.__doc__ = torch_init_process_group.__doc__
destroy_process_group.__doc__ = torch_destroy_process_group.__doc__


def _of_this_process() -> DefaultGroup | None:
    """Return the rank's `DefaultGroup`; None in a process that user code has forked, where the
    parent's groups are removed from torch's registries first.
    """
    global _of_rank
    if _of_rank is not None and _of_rank.pid != os.getpid():
        _inherited.append((_of_rank, c10d._world))
        use(World())
        _unregister_all_process_groups()
        _of_rank = None
    return _of_rank


class DefaultGroup:
    """Switches a rank's default process group between the mesh's, one that a user's program makes,
    and none.

    Args:
        calls: finds the other ranks that take part in a program's call.
        backend: backend of the mesh's group.
        rank: this rank's number in the mesh.

    Attributes:
        mesh_world: torch's registries with the mesh's groups; others are in use while a program
            has other groups, or none.
        own: names of the mesh's groups; ``destroy_process_group`` destroys all others.
        destroyed_by: code and line of the frames that destroyed the default group last, outermost
            first.
    """

    def __init__(self, calls: ProgramCalls, backend: str, rank: int) -> None:
        self._calls, self._backend, self._rank = calls, backend, rank
        self.pid = os.getpid()
        self._is_script = False
        self.mesh_world: Any = c10d._world
        self.own: set[str] = set()
        self.destroyed_by: Sequence[tuple[types.CodeType, int]] = ()

    def take_over(self) -> None:
        """Make this process's ``init_process_group`` and ``destroy_process_group`` call this
        `DefaultGroup`, and replace torch's rendezvous handlers.
        """
        global _of_rank
        install()
        self._calls.install()
        _of_rank = self

    @property
    def is_the_meshs(self) -> bool:
        """Whether torch uses the mesh's groups, rather than a program's groups or none."""
        return c10d._world is self.mesh_world

    @property
    def program(self) -> str:
        """Name of the default group that a user's program has made; "" if torch uses the mesh's
        group or none.
        """
        has_own = not self.is_the_meshs and dist.is_initialized()
        return str(c10d._get_default_group().group_name) if has_own else ""

    def world_of(self, group: Any) -> Any:
        """Return the set of torch's registries (`World`) in which a process group is registered."""
        return self.mesh_world if group in self.mesh_world.pg_names else c10d._world

    def init(self, asked: dict[str, Any]) -> None:
        """Carry out a call of ``init_process_group``; `asked`: its arguments by name."""
        if self._is_script and dist.is_initialized():
            torch_init_process_group()  # raises
        call = _read(asked)
        is_whole = call.size in (None, self._calls.world_size) and call.rank in (None, self._rank)
        backend = asked["backend"]
        plain = self._backend.replace("cpu:", "").replace("cuda:", "").split(",")
        suits = backend is None or str(backend).lower() in (self._backend, *plain)
        was_the_meshs = self.is_the_meshs
        if is_whole and suits:
            self.restore()
            return
        if is_whole and was_the_meshs:
            raise ValueError(
                f"the mesh's process group is {self._backend!r}, not {backend!r}: call "
                "dist.destroy_process_group() first, or %dist_stop and start with --backend "
                f"{backend}"
            )
        if was_the_meshs:
            use(World())
        elif dist.is_initialized():
            self.destroy(None)
        try:
            self._init(asked, call)
        except BaseException:
            if was_the_meshs:
                self.restore()
            raise

    def _init(self, asked: dict[str, Any], call: Call) -> None:
        asked = asked | {
            "timeout": asked["timeout"] or TIMEOUT,
            "backend": asked["backend"] or self._backend,
        }
        self._calls.for_group = True
        try:
            if asked["store"] is not None and call.rank is not None and call.size is not None:
                asked["store"] = self._calls.meet(call, asked["timeout"]).store
            torch_init_process_group(**asked)
        except BaseException:
            self._calls.forget_group()
            raise
        finally:
            self._calls.for_group = False

    def destroy(self, group: Any) -> None:
        """Carry out a call of ``destroy_process_group``."""
        if group not in (None, dist.group.WORLD) or not dist.is_initialized():
            torch_destroy_process_group(group)  # raises if there is no default group
            return
        frames = traceback.walk_stack(sys._getframe())
        self.destroyed_by = [(frame.f_code, line) for frame, line in frames][::-1]
        if not self.is_the_meshs:
            torch_destroy_process_group()
            _register_names(self.mesh_world)
            self._calls.forget_group()
            return
        for other, name in list(c10d._world.pg_names.items()):
            if name not in self.own:
                torch_destroy_process_group(other)
        use(World())

    def restore(self) -> None:
        """Make torch use the mesh's groups again, after destroying those of a user's program."""
        if not self.is_the_meshs:
            if dist.is_initialized():
                self.destroy(None)
            use(self.mesh_world)

    def hide(self) -> None:
        """Make torch use no default group until a script makes one, which it may do once."""
        self._is_script = True
        use(World())

    def show(self) -> None:
        """Make torch use the mesh's groups again, after a script."""
        self._is_script = False
        self.restore()

    def retire(self) -> None:
        """Unset the mesh's default group in torch before the mesh is resized, but keep torch's
        entries for the old groups, to which user code may still refer.
        """
        self.own |= set(self.mesh_world.pg_names.values())
        self.mesh_world.tags_to_pg.clear()
        c10d._update_default_pg(None)


def _read(asked: dict[str, Any]) -> Call:
    rank, size = asked["rank"], asked["world_size"]
    if (store := asked["store"]) is not None:
        store = getattr(store, "_underlying_non_prefix_store", store)
        place = f"store {getattr(store, 'path', '')}{getattr(store, 'port', '')}"
        return Call(place, None if rank == -1 else rank, None if size == -1 else size)
    return read_call(asked["init_method"] or "env://", rank, size)


def replace(old: Any, new: Any) -> None:
    """Replace a group in torch's registries by another group of the same name."""
    world: Any = c10d._world
    for book in (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.pg_coalesce_state),
    ):
        if old in book:
            entries = [(new if group is old else group, entry) for group, entry in book.items()]
            book.clear()
            book.update(entries)
    for groups in world.tags_to_pg.values():
        groups[:] = [new if group is old else group for group in groups]
    _unregister_process_group(new.group_name)
    _register_process_group(new.group_name, new)


def enter(group: Any, backend: str, store: Any, tag: str | None) -> None:
    """Register a process group that torch has not made itself in torch's registries, as
    ``_new_process_group_helper`` would.
    """
    world = c10d._world
    world.pg_map[group] = (c10d.Backend(backend), store)
    world.pg_names[group] = c10d.GroupName(group.group_name)
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
    _register_process_group(group.group_name, group)
    if tag:
        full_tag = f"user:{tag}"
    else:
        full_tag = f"ptd:{group.group_name}"
        world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(full_tag, []).append(group)
    world.pg_to_tag[group] = full_tag


@contextlib.contextmanager
def apart(rank: int, size: int) -> Iterator[None]:
    """Enter a context in which torch sees no groups but a default group with this rank and size."""
    before = c10d._world
    use(World(ProcessGroup(rank, size)))  # type: ignore[call-arg]
    try:
        yield
    finally:
        use(before)


@contextlib.contextmanager
def lending_name(world: Any, group: Any) -> Iterator[None]:
    """Enter a context in which torch can make a second group with the name of `group`, which is
    registered in `world`.

    torch then sees no other groups.
    """
    name, default = world.pg_names[group], world.default_pg
    _unregister_process_group(name)
    try:
        with apart(default.rank(), default.size()):
            yield
    finally:
        _unregister_process_group(name)
        _register_process_group(name, group)
