"""Reads and edits torch's registries of process groups: dicts by group, lists by tag, C++ names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from .healable_group import HealableGroup


@dataclass
class World:
    """The content of torch's registries of process groups, once the groups are taken out."""

    entries: list[dict[Any, Any]]
    default: Any
    group_count: int


class Books:
    """Reads and edits torch's registries of process groups, and keeps the mesh's groups while a
    program uses others or none.
    """

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
        """Remove all groups from torch's registries, and return them; their names stay in C++."""
        books = [*self._by_group(), c10d._world.tags_to_pg]
        taken = World(
            [dict(book) for book in books], c10d._world.default_pg, c10d._world.group_count
        )
        for book in books:
            book.clear()
        c10d._update_default_pg(None)
        c10d._world.group_count = 0
        return taken

    def retire_all(self) -> set[str]:
        """Remove all groups from torch's registries, but for what describes a group that a program
        still holds; return the names of the described groups.
        """
        taken = self.take_out()
        for book, entries in zip(self._by_group(), taken.entries, strict=False):
            book.update(entries)
        return set(c10d._world.pg_names.values())

    def put_in(self, world: World) -> None:
        """Give torch, whose registries are empty now, the groups that `take_out` has removed."""
        for book, entries in zip(
            [*self._by_group(), c10d._world.tags_to_pg], world.entries, strict=True
        ):
            book.clear()
            book.update(entries)
        c10d._update_default_pg(world.default)
        c10d._world.group_count = world.group_count

    def set_aside(self) -> None:
        """Move the mesh's groups from torch's registries to `aside`, for a program with its own."""
        self.aside = self.take_out()

    def put_back(self) -> None:
        """Move the mesh's groups from `aside` back into torch's registries."""
        assert self.aside is not None
        self.put_in(self.aside)
        self.aside = None

    def register_aside(self) -> None:
        """Register the names of the groups in `aside` in torch's C++ registry again, after torch
        has dropped all names there.
        """
        for group, name in self.aside.entries[1].items() if self.aside else ():
            _register_process_group(name, group)

    @contextlib.contextmanager
    def having(self, group: Any) -> Iterator[None]:
        """Enter a context in which torch's registries contain this group of the mesh, also while a
        program's own groups stand in them instead.
        """
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
        """torch's counter of groups, from which it makes names, as of the mesh's groups."""
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
        """Add a group that torch has not made itself to torch's registries, as
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

    def rebuild(self, group: HealableGroup, make: Callable[[], tuple[Any, Any]]) -> Any:
        """Let torch make a new group under the name of an existing one, whose entries in torch's
        registries stay; return the new group.
        """
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
