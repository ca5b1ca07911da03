"""Rebuilds the process groups of a rank in place, after a failure has cut their connections.

For each group, torch makes a fresh group with the same arguments, and the `HealableGroup` that
models hold works through that one from then on.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore

from ..static_lookup import name_of, text_of
from . import rpc
from .any_backend import constructor_of
from .c10d_registry import Books
from .group_factory import (
    Maker,
    Transport,
    fill_standard_descriptors,
    find_lack,
    set_timeouts,
    timeouts_of,
)
from .healable_group import HealableGroup
from .init_process_group import DefaultGroup
from .model_reset import Survey
from .op_tracking import Ledger
from .rendezvous import Meeting, Presence, Rendezvous
from .store import MeshStore

# How long members of a group may take to connect when all of them take part in a heal.
_CONNECT_S = 30.0


class Healer:
    """Rebuilds the process groups of one rank.

    Args:
        rank, world_size: of the mesh.
        prefix: begins the keys of this start of the mesh in the store.
        store: the mesh's c10d store.
        ledger: the operations of all groups.
        books: torch's registries of groups.
        rendezvous: of programs that call ``init_process_group``.
        default: the default group, the mesh's or a program's.
        maker: makes plain groups.
        living: returns the groups that have been made and not been destroyed.
        cut: closes the connections of all groups.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        prefix: str,
        store: MeshStore,
        ledger: Ledger,
        books: Books,
        rendezvous: Rendezvous,
        default: DefaultGroup,
        maker: Maker,
        living: Callable[[], list[HealableGroup]],
        cut: Callable[[], int],
    ) -> None:
        self._rank, self.world_size, self._prefix = rank, world_size, prefix
        self._store, self._ledger, self._books = store, ledger, books
        self._rendezvous, self._default, self._maker = rendezvous, default, maker
        self._living, self._cut = living, cut
        self._keys: list[str] = []
        self._half_done: tuple[str, ...] = ()  # as a heal that failed has found

    def heal(self, generation: int, participants: frozenset[int]) -> tuple[str, ...]:
        """Reconnect every group whose members all take part (`Groups.heal`).

        Collective among the participants; blocks.
        """
        fill_standard_descriptors()  # before the store's connection, which may be made again
        rpc.forget_gatherings()
        self._ledger.generation = generation
        self._rendezvous.begin_generation(generation)
        self._ledger.spans.end_all()  # what was cut has no other end
        prefix = f"{self._prefix}/{generation:x}"
        gc.collect()  # ranks would differ in models without references
        models = Survey(self._half_done)
        self._half_done = models.half_done
        self._cut()
        for group in self._living():
            if group.inner is not None:
                group.timeouts = timeouts_of(group.inner)
            group.take_down("it is being healed")
        self._ledger.forget_operations()
        self._ledger.mark()
        self._ledger.num_doubts += 1
        c10d._world.pg_coalesce_state.clear()  # else an interrupted batch takes the next ones
        meeting = Meeting(self._store, prefix, self._rank, participants)
        old_keys, self._keys = self._keys, meeting.keys
        meeting.exchange_presence(self._presence(models))
        self._ledger.drain.let_go()  # all who are here have cut their side
        self._agree(list(meeting.present.values()))
        made: list[str] = []
        with self._rebuilding(meeting.keys):
            for group in sorted(self._living(), key=_order):
                why = meeting.why_not(group.plan, self.world_size)
                if why:
                    group.take_down(why)
                    continue
                place = f"{prefix}/groups/{','.join(map(str, group.plan.ranks))}"
                if creator := constructor_of(group.plan.backend):
                    made.append(self._rebuild_foreign(group, place, creator))
                else:
                    self._rebuild(group, place)
        notes = (*made, *meeting.reset(models))
        self._half_done = ()
        meeting.exchange("healed", b"")
        self._store.forget_keys(old_keys)
        return notes

    def reset_models(self, generation: int, participants: frozenset[int]) -> tuple[str, ...]:
        """Reset the models that an unfinished step has left half done on any rank; the groups
        stand, and what has been begun on them ends (`Groups.reset_models`).

        Collective among the participants; blocks.
        """
        self._ledger.await_operations(_CONNECT_S)
        self._ledger.num_doubts += 1
        gc.collect()  # ranks would differ in models without references
        models = Survey(self._half_done)
        self._half_done = models.half_done
        c10d._world.pg_coalesce_state.clear()
        prefix = f"{self._prefix}/{generation:x}"
        meeting = Meeting(self._store, prefix, self._rank, participants)
        old_keys, self._keys = self._keys, meeting.keys
        meeting.exchange_presence(self._presence(models))
        notes = meeting.reset(models)
        self._half_done = ()
        meeting.exchange("healed", b"")
        self._store.forget_keys(old_keys)
        return notes

    def _presence(self, models: Survey) -> Presence:
        return Presence(
            tuple(group.plan for group in self._living()),
            self._books.group_count,
            models.half_done,
            models.progress,
            self._default.is_the_meshs,
            {program: c10d._world.group_count} if (program := self._default.program) else {},
            find_lack((group.size() for group in self._living()), self._ledger.drain.num_held),
        )

    def _agree(self, present: Sequence[Presence]) -> None:
        """Set torch's group counters to their maximum over all ranks; return to the mesh's
        groups if another rank uses them and no program's group is in use here.
        """
        program = self._default.program
        if not program and any(other.uses_meshs for other in present):
            self._default.restore()
        self._books.group_count = max(other.group_count for other in present)
        if program:
            c10d._world.group_count = max(other.program.get(program, 0) for other in present)

    @contextlib.contextmanager
    def _rebuilding(self, keys: list[str]) -> Iterator[None]:
        """Enter a context in which groups count as being reconnected, and in which the store keys
        that this rank sets are appended to `keys`.
        """
        self._store.note_keys(keys)
        self._ledger.is_rebuilding = True
        try:
            yield
        finally:
            self._store.note_keys(None)
            self._ledger.is_rebuilding = False

    def _rebuild(self, group: HealableGroup, prefix: str) -> None:
        store = PrefixStore(prefix, self._store)
        asked = group.recipe | {"store": store, "pg_tag": None, "group_desc": group.group_desc}
        transport = Transport()

        def make() -> tuple[Any, Any]:
            nonlocal transport
            made, its_store, transport = self._maker.make(asked, _CONNECT_S)
            return made, its_store

        with self._books.having(group):
            inner = self._books.rebuild(group, make)
        set_timeouts(inner, group.timeouts)
        group.connect(inner, transport)

    def _rebuild_foreign(self, group: HealableGroup, prefix: str, creator: str) -> str:
        """Make a group again by the constructor of its backend, which a program has registered;
        return a note. An error of that constructor is no error of the heal.
        """
        name = f"the process group {str(group.group_name)!r}, backend {group.plan.backend!r},"
        try:
            self._rebuild(group, prefix)
        except Exception as error:
            why = f"{creator}, its backend's constructor, raised {name_of(error)}: {text_of(error)}"
            group.take_down(why)
            return f"{name} is down: {why}"
        return f"{name} was made again by {creator}"


def _order(group: HealableGroup) -> tuple[bool, str, tuple[int, ...]]:
    """Return the key by which every rank sorts its groups before it reconnects them, so that ranks
    do not wait for each other in different groups.
    """
    return bool(group.plan.ranks), group.plan.name, group.plan.ranks
