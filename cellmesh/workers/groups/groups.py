"""Makes the process groups of a rank and its DeviceMesh, closes the groups' connections after a
failure, and reconnects the groups in place.

torch makes every group through ``_new_process_group_helper``, which is wrapped here: torch makes
its group as usual, and a `HealableGroup` takes the group's place in torch's registries, so that all
code above works as under torchrun. At a heal, torch makes a new group with the same arguments, and
the `HealableGroup` that models hold delegates to the new group from then on.
"""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...errors import MeshUsageError
from ...stdlib import os, time
from ...wire.groups import GroupCount
from ..static_lookup import name_of, text_of
from ..trace.recorder import Spans
from . import connections, default_group, rpc
from .any_backend import constructor_of, find_unregistered
from .default_group import DefaultGroup, torch_init_process_group
from .group_factory import (
    TIMEOUT,
    BlueprintData,
    GroupPlan,
    Maker,
    MeshPlan,
    Placement,
    call_for,
    fill_standard_descriptors,
    find_lack,
    plan_of,
)
from .healable_group import HealableGroup
from .healing import Healing, StateAtHeal
from .ledger import GroupRecord, Ledger, Signed, as_begun, compare_first
from .model_reset import BackwardPasses, HealCallbacks, Survey, note_reducers
from .program_calls import Agreement, ProgramCalls
from .store import MeshStore
from .waits import Waits

# Programs' groups are named by numbers, of which each program has a range of this size.
_GROUPS_A_PROGRAM = 1000
# The groups of each size of the mesh have a range of this size.
_GROUPS_A_SIZE = 10_000_000
# Number of compared collectives whose keys are kept in the store.
_MAX_FIRSTS = 64
# How long the members of a group may take to connect at a heal in which all take part.
_CONNECT_S = 30.0


@dataclass(frozen=True)
class Making:
    """A process group that this rank is making.

    Attributes:
        name: torch's name of the group.
        ranks: ranks of its members in the mesh; () for all.
        since: when the rank began to make it, by ``time.monotonic``.
        label: name of a link for users; "" for a group of the mesh.
    """

    name: str
    ranks: tuple[int, ...]
    since: float
    label: str = ""


class Groups:
    """The process groups of this rank, and its client of the c10d store on MASTER_ADDR.

    The store's keys are separate for each incarnation (start or restart) of the mesh.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        placement: Placement,
        store_port: int,
        incarnation: int,
        num_resizes: int = 0,
        spans: Spans | None = None,
    ) -> None:
        self.rank, self.placement, self.num_resizes = rank, placement, num_resizes
        self._prefix = f"cellmesh/{incarnation}"
        self._waits = Waits()
        self._store = MeshStore(os.environ["MASTER_ADDR"], store_port, self._waits)
        self.ledger = Ledger(self._waits, spans=spans or Spans(), compare_first=self._compare_first)
        self.calls = ProgramCalls(self._store, self._prefix, rank, world_size)
        self._default = DefaultGroup(self.calls, placement.backend, rank)
        self._groups: list[weakref.ref[HealableGroup]] = []
        self.links: dict[str, Any] = {}  # name -> `workers.links.LinkedGroup` with other meshes
        self._plans: list[GroupPlan] = []
        self._mesh: MeshPlan | None = None
        # The rank's DeviceMesh `mesh`, even if the user has bound the name to another object.
        self.mesh: DeviceMesh | None = None
        self._maker = Maker(self._store, self._waits)
        self.making: Making | None = None
        self._is_broken = self._is_replaying = False
        self._firsts: deque[str] = deque()
        self.backward_passes, self.heal_callbacks = BackwardPasses(), HealCallbacks()
        self.is_half_done = False  # whether a step has left models half done
        self._half_done: tuple[str, ...] = ()  # models that a failed heal has found
        # The last heal, whose store the groups use (True), and the last reset of models only
        # (False).
        self._healings: dict[bool, Healing] = {}

    @property
    def world_size(self) -> int:
        """Number of the mesh's ranks."""
        return self.calls.world_size

    def initialize(self) -> None:
        """Make the default process group; a collective of all ranks."""
        self._take_over()
        self._begin_names()
        self._store.gather(f"{self._prefix}/start", self.world_size)
        self._init_process_group()

    def hide(self, undo: contextlib.ExitStack) -> None:
        """Let a script find torch as in a new process, without a default process group; `undo`
        brings the mesh's back.
        """
        self._default.hide()
        undo.callback(self._default.show)

    def build_mesh(self, names: Sequence[str], shape: Sequence[int]) -> DeviceMesh:
        """Make a DeviceMesh over all ranks; a collective of all ranks."""
        self._default.restore()
        first_group, before = c10d._world.group_count, set(c10d._world.pg_names.values())
        mesh = init_device_mesh(
            self.placement.device.type, tuple(shape), mesh_dim_names=tuple(names)
        )
        dims = set(c10d._world.pg_names.values()) - before
        self._default.own |= {c10d._get_default_group().group_name} | dims
        self._mesh, self.mesh = MeshPlan(tuple(names), tuple(shape), first_group), mesh
        return mesh

    def _compare_first(self, record: GroupRecord, signed: Signed, size: int) -> None:
        """Raise if this rank's first collective on a group after a stop or a heal does not match
        that of the group's other members (see `compare_first`).
        """
        # Members with different runs or numbers use different keys; they wait, and the controller's
        # verdict describes the difference.
        run, number = self.ledger.gate.running(), signed[0]
        if run < 0 or size < 2:
            return
        key = f"{self._prefix}/{self.ledger.generation:x}/first/{run}/{record.name}/{number}"
        compare_first(self._store, key, as_begun(*signed, record.ranks), f"on {record.label}")
        self._firsts.append(key)
        if len(self._firsts) > _MAX_FIRSTS:
            with contextlib.suppress(Exception):  # the store and its keys are lost
                self._store.delete_key(self._firsts.popleft())

    @property
    def destroyed_by(self) -> Sequence[tuple[types.CodeType, int]]:
        """Code and line of the frames that destroyed the default group last, outermost first."""
        return self._default.destroyed_by

    def _take_over(self) -> None:
        """Redirect torch's construction of process groups in this process to this object."""
        connections.prepare_nccl(os.environ, self.placement.device)
        if self.placement.device.type == "cuda":
            torch.cuda.set_device(self.placement.device)
        self._maker.intercept(self._new_group)
        self._default.take_over()
        note_reducers(self._waits.keep_types)
        self.backward_passes.install()

    def _init_process_group(self) -> None:
        torch_init_process_group(
            self.placement.backend,
            timeout=TIMEOUT,
            store=PrefixStore(f"{self._prefix}.start", self._store),
            rank=self.rank,
            world_size=self.world_size,
        )

    def _new_group(self, asked: dict[str, Any]) -> Any:
        """Make a group for a call of ``_new_process_group_helper`` with arguments `asked`."""
        if self._is_replaying:
            return self._replay_group(asked)
        agreed = self._agreement()
        if agreed is not None and not asked["global_ranks_in_group"]:
            # Use other names than the mesh's groups, and than an earlier program's.
            count = agreed.number * _GROUPS_A_PROGRAM
            asked["group_name"], c10d._world.group_count = c10d.GroupName(str(count)), count + 1
        asked["device_id"] = None  # as `HealableGroup.bound_device_id`
        # A rank that was replaced while its host was cut off does not know later heals, and so
        # meets no other rank.
        generation = f"generation{self.ledger.generation:x}"
        asked["store"] = PrefixStore(generation, asked["store"])
        plan = plan_of(asked, self._members(asked))
        self.making = Making(plan.name, plan.ranks, time.monotonic())
        try:
            made, store, transport = self._maker.make(asked)
        except BaseException:
            self._is_broken = True  # other ranks may have made it
            raise
        finally:
            self.making = None
        if isinstance(made, HealableGroup):
            return made, store  # made earlier, under a tag
        self._note_plan(plan)
        if made is c10d.GroupMember.NON_GROUP_MEMBER:
            return made, store
        group = self._enlist(asked, plan)
        group.connect(made, transport)
        default_group.replace(made, group)
        return group, store

    def _agreement(self) -> Agreement | None:
        """Return the `Agreement` by which ranks have made the program's default process group; None
        if there is no such group, or while the mesh's groups are in use.
        """
        return None if self._default.is_the_meshs else self.calls.of_group

    def _members(self, asked: dict[str, Any]) -> tuple[int, ...]:
        """Return the mesh ranks of the members of the group that a call of
        ``_new_process_group_helper`` makes; () for the mesh's own default group.
        """
        ranks = tuple(asked["global_ranks_in_group"])
        agreed = self._agreement()
        if agreed is None:
            return ranks
        return tuple(agreed.members[rank] for rank in ranks) or agreed.members

    def _note_plan(self, plan: GroupPlan) -> None:
        if self._default.is_the_meshs:  # new ranks must not make a program's groups
            self._plans.append(plan)

    def _enlist(self, asked: dict[str, Any], plan: GroupPlan) -> HealableGroup:
        """Make an unconnected `HealableGroup` for a call of ``_new_process_group_helper``."""
        rank, size = asked["group_rank"], asked["group_size"]
        group = HealableGroup(self.ledger, plan, rank, size, dict(asked))
        self._groups.append(weakref.ref(group))
        return group

    # Queries and cuts, from any thread.

    @property
    def is_broken(self) -> bool:
        """Whether the process groups must be healed (reconnected), as connections of some were
        closed or lost.
        """
        if self._is_broken or self._waits.has_left:
            return True
        return not all(connections.all_stand(group.sockets) for group in self._living())

    def mark_broken(self) -> None:
        """Mark the process groups as broken, so that they are healed (reconnected) before the next
        run.
        """
        self._is_broken = True

    def release(self, is_needed: Callable[[], bool] = lambda: True) -> int:
        """Make every wait for other ranks in this process raise; return the number of waits ended
        and connections closed. Any thread may call it.

        Args:
            is_needed: asked once the groups count as broken, so that a run that ends after it
                leaves them so; if it returns False, nothing is done.
        """
        # Set first: an operation that is cut raises at once, on another thread.
        was_broken, self._is_broken = self._is_broken, True
        num_cut = 0
        if is_needed():
            num_cut = self._waits.end() + self._cut([*self._living(), *self.links.values()])
            num_cut += self._maker.own_gloo.cut(self.ledger.kept)
        if not num_cut:
            self._is_broken = was_broken
        return num_cut

    def _cut(self, groups: Sequence[HealableGroup]) -> int:
        sockets = {fd: inode for group in groups for fd, inode in group.sockets.items()}
        before = [(group, group.transport) for group in groups]
        connections.await_quiet(sockets)
        # Not a group that the main thread has connected again in between, as its run has ended.
        return sum(group.cut() for group, transport in before if group.transport is transport)

    def counts(self, with_recent: bool = False) -> tuple[GroupCount, ...]:
        """Return the number of operations that this rank has begun on each group since it was made
        or healed; `with_recent`: also the last collectives among them.
        """
        return tuple(group.record.count(with_recent=with_recent) for group in self._living())

    def find_link(self, name: str) -> Any:
        """Return the process group of a link with another mesh (`cellmesh.group`)."""
        known = {each: link for each, link in self.links.items() if link.spec.state != "dropped"}
        if (link := known.get(name)) is None:
            there = f" (there is {', '.join(known)})" if known else ""
            raise MeshUsageError(
                f"this rank has no link {name!r}{there}: cellmesh.link(a, b, name={name!r}) in the "
                "notebook makes one"
            )
        self._default.own.add(str(link.group_name))
        link.enter()
        return link

    def make_apart(self, asked: dict[str, Any], store: MeshStore, limit_s: float) -> Any:
        """Let torch make a plain group with ranks of other meshes, which is in none of torch's
        registries; return it with its connections.

        Args:
            asked: arguments of ``_new_process_group_helper``.
            store: the store of its members.
            limit_s: how long they may take to connect, in seconds.
        """
        connections.prepare_nccl(os.environ, self.placement.device)
        self._maker.own_gloo.install()  # a mesh without a process group has made none yet
        with default_group.apart(asked["group_rank"], asked["group_size"]):
            made, _, transport = self._maker.make(asked, limit_s, store)
        _unregister_process_group(asked["group_name"])
        return made, transport

    @property
    def store_address(self) -> str:
        """Address of the mesh's c10d store."""
        return self._store.host

    def blueprint(self) -> bytes:
        """Return data from which a new rank makes the same groups as this rank (see `rejoin`)."""
        return msgspec.msgpack.encode(
            BlueprintData(tuple(self._plans), self._default.mesh_world.group_count, self._mesh)
        )

    def _living(self) -> list[HealableGroup]:
        """Return the groups that have been made and not destroyed, oldest first."""
        found = [reference() for reference in list(self._groups)]
        return [group for group in found if group is not None and not group.is_destroyed]

    # Groups without connections, which a later `heal` connects.

    def resize(
        self, num_resizes: int, size: int, names: Sequence[str], shape: Sequence[int]
    ) -> DeviceMesh:
        """Drop all process groups, and make those of a mesh of another size, which a later `heal`
        connects.

        Args:
            num_resizes: how often the mesh has been resized. Names of groups are not reused: an
                object bound to an old group keeps that group, which is down.
            size: number of ranks of the mesh.
            names, shape: names and sizes of the DeviceMesh's dims.

        Returns:
            The rank's DeviceMesh.
        """
        self._default.restore()
        self._cut(self._living())
        for group in self._living():
            group.take_down(
                f"it is of a mesh of {self.world_size} ranks, and the mesh has {size} now",
                "Make again what holds it, on `mesh`; %dist_load gives it what %dist_save saved "
                "before",
            )
        self._default.retire()
        self._groups.clear()
        self._plans.clear()
        self.num_resizes = num_resizes
        self.calls.world_size = size
        with self._replaying():
            self._begin_names()
            self._init_process_group()
            return self.build_mesh(names, shape)

    def _begin_names(self) -> None:
        """Set torch's counter of groups, from which it names them, to a range that belongs to the
        current size of the mesh.
        """
        c10d._world.group_count = self.num_resizes * _GROUPS_A_SIZE

    def rejoin(self, blueprint: bytes, names: Sequence[str], shape: Sequence[int]) -> DeviceMesh:
        """Make the process groups that another rank's `blueprint` describes in this new rank, for a
        later `heal` to connect; return the new rank's DeviceMesh.
        """
        data = BlueprintData((), 0)
        if blueprint:
            data = msgspec.msgpack.decode(blueprint, type=BlueprintData)
        self._take_over()
        self._begin_names()
        mesh = MeshPlan(tuple(names), tuple(shape), c10d._world.group_count + 1)
        if data.mesh is not None and (data.mesh.names, data.mesh.shape) == (mesh.names, mesh.shape):
            mesh = data.mesh
        with self._replaying():
            self._init_process_group()
            for plan in data.groups:
                # A group whose backend this process lacks stays down on the other ranks, too.
                if not plan.ranks or find_unregistered(plan.backend):
                    continue
                group, _ = self._replay_group(call_for(plan, self.rank, c10d._get_default_store()))
                if isinstance(group, HealableGroup):
                    numbers = {rank: number for number, rank in enumerate(plan.ranks)}
                    c10d._world.pg_group_ranks[group] = numbers
            c10d._world.group_count = mesh.first_group
            made = self.build_mesh(mesh.names, mesh.shape)
        c10d._world.group_count = max(data.group_count, c10d._world.group_count)
        return made

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[None]:
        """Enter a context in which torch makes groups without connections."""
        barrier = os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
        self._is_replaying = True
        try:
            yield
        finally:
            self._is_replaying = False
            if barrier is not None:
                os.environ["TORCH_DIST_INIT_BARRIER"] = barrier

    def _replay_group(self, asked: dict[str, Any]) -> Any:
        """Make a group without connections for a call of ``_new_process_group_helper`` with
        arguments `asked`.
        """
        name, ranks = asked["group_name"], asked["global_ranks_in_group"]
        for group in self._living():
            if group.group_name == name:
                return group, c10d._world.pg_map[group][1]
        plan = plan_of(asked, self._members(asked))
        if not any(known.name == name for known in self._plans):
            self._note_plan(plan)
        if ranks and self.rank not in ranks:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        group = self._enlist(asked, plan)
        store = PrefixStore(f"{name}/", asked["store"])
        default_group.enter(group, asked["backend"], store, asked["pg_tag"])
        return group, store

    # Heals, on the main thread.

    def heal(
        self,
        generation: int,
        participants: frozenset[int],
        store_port: int | None = None,
        store_address: str = "",
    ) -> tuple[str, ...]:
        """Reconnect every process group whose members all take part in the heal; a collective of
        these participants.

        After an error (`GroupDown` if a rank does not take part), every group is down.

        Args:
            generation: a number not used before in this mesh.
            participants: ranks that take part.
            store_port: port of the c10d store, if its process was replaced.
            store_address: address of the store's host, if the store has moved to another host.

        Returns:
            Notes for the user on models in which a step was stopped.
        """
        if store_port is not None:
            self._store.move(store_port, store_address)
        try:
            notes = self._heal(generation, participants)
        except BaseException:
            self._is_broken = True
            self._cut(self._living())
            for group in self._living():
                group.take_down("healing it was interrupted")
            raise
        self._is_broken = self._waits.has_left = self.is_half_done = False
        return (*notes, *self._maker.own_gloo.take_notes(), *self.heal_callbacks.call())

    def _heal(self, generation: int, participants: frozenset[int]) -> tuple[str, ...]:
        fill_standard_descriptors()  # before the store reconnects
        rpc.forget_gatherings()
        self.ledger.generation = generation
        self.calls.begin_generation(generation)
        self.ledger.spans.end_all()  # operations that were cut do not end otherwise
        models = self._survey()
        self._cut(self._living())
        for group in self._living():
            group.take_down("it is being healed")
        self.ledger.forget_operations()
        self.ledger.mark()
        healing = self._meet(generation, participants, models)
        if len(participants) == self.world_size:
            self.ledger.kept.let_go()  # all ranks have cut their connections
        self._agree(list(healing.states.values()))
        made: list[str] = []
        # In the same order on all ranks, so that no two wait for each other in different groups.
        for group in sorted(
            self._living(), key=lambda one: (bool(one.plan.ranks), one.plan.name, one.plan.ranks)
        ):
            if why := healing.why_not(group.plan, self.world_size):
                group.take_down(why)
            else:
                made += self._rebuild(group, healing)
        return (*made, *self._part(healing, models, keeps_groups=False))

    def reset_models(self, generation: int, participants: frozenset[int]) -> tuple[str, ...]:
        """Reset the models that an unfinished training step has left half done on any participant;
        a collective of the participants.

        Operations in progress are waited for, and groups stay connected. Arguments and result are
        as for `heal`.
        """
        try:
            self.ledger.await_operations(_CONNECT_S)
            models = self._survey()
            healing = self._meet(generation, participants, models)
            notes = self._part(healing, models, keeps_groups=True)
        except BaseException:
            self._is_broken = True
            raise
        self.is_half_done = False
        return (*notes, *self.heal_callbacks.call())

    def _survey(self) -> Survey:
        """Return the state of this rank's models after an unfinished step."""
        gc.collect()  # else unreferenced models would make ranks differ
        models = Survey(self._half_done)
        self._half_done = models.half_done
        self.ledger.num_doubts += 1
        c10d._world.pg_coalesce_state.clear()  # an interrupted batch would take the next operations
        return models

    def _meet(self, generation: int, participants: frozenset[int], models: Survey) -> Healing:
        healing = Healing(self._store, f"{self._prefix}/{generation:x}", self.rank, participants)
        groups, program = self._living(), self._default.program
        healing.exchange_states(
            StateAtHeal(
                tuple(group.plan for group in groups),
                self._default.mesh_world.group_count,
                models.half_done,
                models.progress,
                self._default.is_the_meshs,
                {program: c10d._world.group_count} if program else {},
                find_lack((group.size() for group in groups), len(self.ledger.kept)),
            )
        )
        return healing

    def _part(self, healing: Healing, models: Survey, keeps_groups: bool) -> tuple[str, ...]:
        """Complete a heal: reset models, and wait until all participants have done so; return notes
        for the user.
        """
        notes = healing.reset(models)
        self._half_done = ()
        healing.exchange("healed", b"")
        before = self._healings.get(keeps_groups)
        self._healings[keeps_groups] = healing
        if before is not None:
            before.store.forget_keys()
        return notes

    def _agree(self, states: Sequence[StateAtHeal]) -> None:
        """Set torch's counters of groups to their maximum over all ranks; make torch use the mesh's
        groups again if another rank uses them and no program's group is in use here.
        """
        program = self._default.program
        if not program and any(other.uses_meshs for other in states):
            self._default.restore()
        self._default.mesh_world.group_count = max(other.group_count for other in states)
        if program:
            c10d._world.group_count = max(other.program.get(program, 0) for other in states)

    def _rebuild(self, group: HealableGroup, healing: Healing) -> tuple[str, ...]:
        """Let torch make a new inner ``ProcessGroup`` for a `HealableGroup`, and connect it; return
        notes for the user.

        An error of a backend's constructor that a program has registered does not fail the heal; a
        note then describes the result.
        """
        plan, creator = group.plan, constructor_of(group.plan.backend)
        store = PrefixStore(f"groups/{','.join(map(str, plan.ranks))}", healing.store)
        asked = group.recipe | {"store": store, "pg_tag": None, "group_desc": group.group_desc}
        world = self._default.world_of(group)
        name = f"the process group {str(group.group_name)!r}, backend {plan.backend!r},"
        try:
            with default_group.lending_name(world, group):
                inner, its_store, transport = self._maker.make(asked, _CONNECT_S)
            world.pg_map[group] = (world.pg_map[group][0], its_store)
            group.connect(inner, transport)
        except Exception as error:
            if not creator:
                raise
            why = f"{creator}, its backend's constructor, raised {name_of(error)}: {text_of(error)}"
            group.take_down(why)
            return (f"{name} is down: {why}",)
        return (f"{name} was made again by {creator}",) if creator else ()
