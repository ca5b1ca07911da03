"""``init_process_group`` and ``destroy_process_group`` as programs on a rank call them, and torch's
registries of process groups.

A rank has the mesh's default group from the start: a program that asks for the whole mesh finds it.
One that asks for another size or rank gets a default group of its own, and the mesh's groups are
set aside; so they are by ``destroy_process_group``. Set aside, they stay connected and are healed
as ever; they are back when a program asks for the whole mesh again, in the same objects.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    _register_process_group,
    _unregister_all_process_groups,
    _unregister_process_group,
)

from .group_factory import TIMEOUT
from .healing import HealableGroup
from .rendezvous import Call, Rendezvous, read_call

torch_init_process_group = c10d.init_process_group
torch_destroy_process_group = c10d.destroy_process_group
_signature = inspect.signature(torch_init_process_group)
_of_rank: DefaultGroup | None = None
_inherited: list[Any] = []  # what a forked process has of its parent's groups, and may not end


def install() -> None:
    """Replace torch's functions, before the zygote preloads modules."""
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
    """The rank's `DefaultGroup`; None in a fork, where torch forgets the parent's groups."""
    global _of_rank
    if _of_rank is not None and _of_rank.pid != os.getpid():
        _inherited.append((_of_rank, _of_rank.books.take_out()))
        _unregister_all_process_groups()
        _of_rank = None
    return _of_rank


@dataclass
class World:
    """The content of torch's registries of process groups, taken out of torch."""

    entries: list[dict[Any, Any]]
    default: Any
    group_count: int


class Books:
    """torch's registries of groups: dictionaries by group, lists by tag, C++ by name."""

    def __init__(self) -> None:
        # The mesh's groups while a program has others, or none.
        self.aside: World | None = None

    @staticmethod
    def _by_group() -> list[dict[Any, Any]]:
        world = c10d._world
        return [
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.pg_coalesce_state,
        ]

    def take_out(self) -> World:
        """Remove all groups from torch; their names stay registered in C++."""
        books = [*self._by_group(), c10d._world.tags_to_pg]
        taken = World(
            [dict(book) for book in books], c10d._world.default_pg, c10d._world.group_count
        )
        for book in books:
            book.clear()
        c10d._update_default_pg(None)
        c10d._world.group_count = 0
        return taken

    def put_in(self, world: World) -> None:
        """Give torch, which has no groups now, the groups that `take_out` has removed."""
        for book, entries in zip(
            [*self._by_group(), c10d._world.tags_to_pg], world.entries, strict=True
        ):
            book.clear()
            book.update(entries)
        c10d._update_default_pg(world.default)
        c10d._world.group_count = world.group_count

    def set_aside(self) -> None:
        """Remove the mesh's groups from torch, and keep them in `aside`."""
        self.aside = self.take_out()

    def put_back(self) -> None:
        """Give torch the mesh's groups again, which were set aside."""
        assert self.aside is not None
        self.put_in(self.aside)
        self.aside = None

    def register_aside(self) -> None:
        """Register the names of the groups set aside again in C++, where torch has dropped all."""
        for group, name in self.aside.entries[1].items() if self.aside else ():
            _register_process_group(name, group)

    @contextlib.contextmanager
    def having(self, group: Any) -> Iterator[None]:
        """A context in which torch has this group, whether it is the mesh's or a program's."""
        aside = self.aside
        if aside is None or group not in aside.entries[1]:
            yield
            return
        programs = self.take_out()
        self.put_in(aside)
        try:
            yield
        finally:
            self.aside = self.take_out()
            self.put_in(programs)

    @property
    def group_count(self) -> int:
        """torch's counter of the mesh's groups."""
        return c10d._world.group_count if self.aside is None else self.aside.group_count

    @group_count.setter
    def group_count(self, count: int) -> None:
        (c10d._world if self.aside is None else self.aside).group_count = count

    def replace(self, old: Any, new: HealableGroup) -> None:
        """Replace a group by another in torch's registries."""
        for book in self._by_group():
            if old in book:
                entries = [(new if group is old else group, entry) for group, entry in book.items()]
                book.clear()
                book.update(entries)
        for groups in c10d._world.tags_to_pg.values():
            groups[:] = [new if group is old else group for group in groups]
        _unregister_process_group(new.group_name)
        _register_process_group(new.group_name, new)

    def remove(self, group: Any) -> None:
        """Remove a group from all registries but the one of names in C++."""
        for book in self._by_group():
            book.pop(group, None)
        for groups in c10d._world.tags_to_pg.values():
            groups[:] = [other for other in groups if other is not group]

    def enter(self, group: HealableGroup, backend: str, store: Any, tag: str | None) -> None:
        """Register, as ``_new_process_group_helper`` does, a group that it has not made."""
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

    def rebuild(self, group: HealableGroup, make: Callable[[], tuple[Any, Any]]) -> Any:
        """Let torch make a group under the name of another, which keeps it; returns the new one."""
        names = c10d._world.pg_names
        before = set(names)
        name = names.pop(group)
        _unregister_process_group(name)
        try:
            inner, store = make()
            c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], store)
            return inner
        finally:
            for other in [other for other in names if other not in before]:
                self.remove(other)
                _unregister_process_group(name)
            names[group] = name
            _register_process_group(name, group)


class DefaultGroup:
    """The default group of a rank: the mesh's, a program's or none."""

    def __init__(
        self, books: Books, rendezvous: Rendezvous, backend: str, rank: int, size: int
    ) -> None:
        self.books, self._rendezvous = books, rendezvous
        self._backend, self._rank, self._size = backend, rank, size
        self.pid = os.getpid()
        # Names of the mesh's groups; others end with a ``destroy_process_group``.
        self.own: set[str] = set()

    def take_over(self) -> None:
        """Handle calls of programs in this process from now on."""
        global _of_rank
        install()
        self._rendezvous.install()
        _of_rank = self

    @property
    def is_the_meshs(self) -> bool:
        """Whether the mesh's groups are in use, and not set aside."""
        return self.books.aside is None

    @property
    def program(self) -> str:
        """The name of a program's default group; "" if the mesh's or none is in use."""
        has_own = not self.is_the_meshs and dist.is_initialized()
        return str(c10d._get_default_group().group_name) if has_own else ""

    def init(self, asked: dict[str, Any]) -> None:
        """Replaces ``init_process_group``; its arguments by name."""
        call = self._read(asked)
        is_whole = call.size in (None, self._size) and call.rank in (None, self._rank)
        backend = asked["backend"]
        plain = self._backend.replace("cpu:", "").replace("cuda:", "").split(",")
        suits = backend is None or str(backend).lower() in (self._backend, *plain)
        if is_whole and suits:
            self.restore()
            return
        if is_whole and self.is_the_meshs:
            raise ValueError(
                f"the mesh's process group is {self._backend!r}, not {backend!r}: call "
                "dist.destroy_process_group() first, or %dist_stop and start with --backend "
                f"{backend}"
            )
        was_the_meshs = self.is_the_meshs
        if was_the_meshs:
            self.books.set_aside()
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
        self._rendezvous.for_group = True
        try:
            if asked["store"] is not None and call.rank is not None and call.size is not None:
                self._rendezvous.session = session = self._rendezvous.meet_over(
                    asked["store"], call.rank, call.size, asked["timeout"]
                )
                asked["store"] = session.store
            torch_init_process_group(**asked)
        except BaseException:
            self._rendezvous.end_session()
            raise
        finally:
            self._rendezvous.for_group = False

    @staticmethod
    def _read(asked: dict[str, Any]) -> Call:
        rank, size = asked["rank"], asked["world_size"]
        if asked["store"] is not None:
            return Call(None, None if rank == -1 else rank, None if size == -1 else size)
        return read_call(asked["init_method"] or "env://", rank, size)

    def destroy(self, group: Any) -> None:
        """Replaces ``destroy_process_group``."""
        if group is not None and group is not dist.group.WORLD:
            torch_destroy_process_group(group)
        elif not self.is_the_meshs:
            torch_destroy_process_group()
            self.books.register_aside()
            self._rendezvous.end_session()
        elif dist.is_initialized():
            for other in [
                one for one, name in c10d._world.pg_names.items() if name not in self.own
            ]:
                torch_destroy_process_group(other)
            self.books.set_aside()
        else:
            torch_destroy_process_group()  # which says what is wrong

    def restore(self) -> None:
        """Make the mesh's groups the ones in use again."""
        if not self.is_the_meshs:
            if dist.is_initialized():
                self.destroy(None)
            self.books.put_back()
