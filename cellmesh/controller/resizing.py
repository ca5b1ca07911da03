"""Resizes a mesh: plans the number of ranks on each host and the DeviceMesh dims, starts agents on
hosts that join, sends them the user's modules, and then starts the change in the core. A failure
before that leaves the mesh unchanged, and ends the new agents.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import CellmeshError, MeshUsageError, NoMeshError
from ..wire.hosts import Host
from ..wire.mesh_dims import check_mesh, parse_mesh
from ..wire.peer_calls import PEER_RUNS
from ..wire.ranks import describe_ranks
from ..wire.status import RankState
from .code_files.sync import FILES_S, CodeSync
from .core.core import Answer, Core, Effect, HealReport
from .host_list import parse_hosts
from .news import Reply
from .options import check_num_ranks
from .session.hosts.connections import Connections
from .session.hosts.start import Claim, Post, call_in_loop
from .session.launch.local import Launcher
from .session.standing import end_agents

ONE_HOST = (
    "the mesh runs on this machine alone: other hosts join one that was started on hosts, like "
    "`%dist_start --hosts a:4,b:4`"
)


@dataclass(frozen=True)
class Resizing:
    """The new layout of a mesh that is to be resized.

    Attributes:
        layout: number of ranks on each host, in the order of the hosts.
        new_hosts: hosts that join; they are the last in `layout`.
        dims: dims of the DeviceMesh, name -> size.
    """

    layout: tuple[int, ...]
    new_hosts: tuple[Host, ...]
    dims: Mapping[str, int]


def plan_resize(
    num_ranks: Any,
    hosts: str | Iterable[str],
    mesh: Mapping[str, int] | str | None,
    *,
    layout: Sequence[int],
    names: Sequence[str],
    dims: Mapping[str, int],
) -> Resizing:
    """Plan a resize: the highest ranks end, or new ranks are added after the last.

    Args:
        num_ranks: new number of ranks; None if the hosts or the dims determine it.
        hosts: hosts that join, such as ``"c:2"``.
        mesh: new dims of the DeviceMesh; None if it has one dim.
        layout: current number of ranks on each host.
        names: names of the current hosts; () for a mesh on one host.
        dims: current dims of the DeviceMesh.

    Raises:
        MeshUsageError: the resize is not possible.
    """
    wanted = parse_mesh(mesh) if isinstance(mesh, str) else mesh and dict(mesh)
    before = sum(layout)
    if num_ranks is None and wanted:
        num_ranks = math.prod(check_mesh(wanted, None).values())
    joining = _read_hosts(hosts, None if num_ranks is None else num_ranks - before, names)
    if num_ranks is None and joining:
        num_ranks = before + sum(entry.num_ranks for entry in joining)
    num_ranks = check_num_ranks(num_ranks, f"say how many, as in `%dist_resize {before * 2}`")
    planned = _choose_dims(num_ranks, wanted, dims)
    if num_ranks == before:
        raise MeshUsageError(f"the mesh has {before} ranks: `%dist_mesh` gives it other dims")
    new_layout = _cut(layout, num_ranks) if num_ranks < before else list(layout)
    if joining:
        new_layout += [entry.num_ranks for entry in joining]
        if sum(new_layout) != num_ranks:
            raise MeshUsageError(
                f"the mesh has {before} ranks and {num_ranks} are asked for: the hosts that join "
                f"must have {num_ranks - before} in all"
            )
    elif num_ranks > before:
        new_layout[-1] += num_ranks - before
    return Resizing(tuple(new_layout), joining, planned)


def _read_hosts(
    hosts: str | Iterable[str], num_ranks: Any, names: Sequence[str]
) -> tuple[Host, ...]:
    if not hosts:
        return ()
    if not names:
        raise MeshUsageError(ONE_HOST)
    words = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    joining = parse_hosts(words, num_ranks)
    for entry in joining:
        if entry.name in names:
            raise MeshUsageError(
                f"{entry.name} has ranks of the mesh: only its last host, {names[-1]}, gets more, "
                "without --hosts"
            )
    return joining


def _choose_dims(
    num_ranks: int, wanted: Mapping[str, int] | None, dims: Mapping[str, int]
) -> Mapping[str, int]:
    if wanted:
        return check_mesh(wanted, num_ranks)
    first, *others = dims
    rest = math.prod(dims[name] for name in others)
    if not others:
        return {first: num_ranks}
    now = ", ".join(f"{name}={size}" for name, size in dims.items())
    fits = {first: num_ranks // rest, **{name: dims[name] for name in others}}
    hint = ",".join(f"{name}={size}" for name, size in fits.items())
    hint = hint if num_ranks % rest == 0 else f"{first}={num_ranks}"
    raise MeshUsageError(
        f"the mesh has dims {now}: say those of {num_ranks} ranks, as in "
        f"`%dist_resize {num_ranks} --mesh {hint}`"
    )


def _cut(layout: Sequence[int], num_ranks: int) -> list[int]:
    """Return the number of ranks that each host keeps if only `num_ranks` are kept in all, without
    hosts that keep none.
    """
    kept: list[int] = []
    for size in layout:
        if sum(kept) < num_ranks:
            kept.append(min(size, num_ranks - sum(kept)))
    return kept


def describe_resize(report: HealReport, before: int, dims: Mapping[str, int]) -> str:
    """Return the text that ``%dist_resize`` shows."""
    size = math.prod(dims.values())
    shape = ", ".join(f"{name}={number}" for name, number in dims.items())
    changed = describe_ranks(range(min(before, size), max(before, size)))
    text = f"{changed} ended" if size < before else f"{changed} new and empty"
    lines = [
        f"{size} ranks ({shape}), {before} before: {text}, process groups made in "
        f"{report.took_s:.1f} s; the others hold what they held",
        *report.notes,
    ]
    return "\n".join(lines)


Question = Callable[[Core, float], tuple[int, Sequence[Effect]]]

# How long to wait for the end of unused agents; the link ends later ones once they connect.
_END_S = 10.0


def resize(
    plan: Resizing,
    core: Core,
    ask: Callable[[Question], Reply[Any]],
    post: Post,
    launcher: Launcher,
    hosts: Connections,
    note: Callable[[Resizing, Sequence[Host]], None],
    code: CodeSync | None,
    states: Callable[[Sequence[int]], Mapping[int, RankState]],
) -> HealReport:
    """Resize a mesh as planned. Blocks.

    Args:
        plan: the new layout of the mesh.
        core: core of the mesh.
        ask: has the link's loop put a question to the core, and returns a reply for the answer.
        post: adds a command for the link's loop.
        launcher: starts agents on hosts that join.
        hosts: connections to all hosts.
        note: called in the link's loop once the resize is certain to begin.
        code: copies the user's modules to all hosts, if there are many.
        states: asks ranks for their states.

    Raises:
        MeshUsageError: ranks are busy or dead; nothing has changed.
        HostError: a new host cannot be used; nothing has changed.
    """
    size = sum(plan.layout)
    beyond = range(size, core.mesh.num_ranks)
    if why := core.why_not_resize(size) or _why_not_end(states(beyond) if beyond else {}):
        raise MeshUsageError(f"the mesh cannot be resized now: {why}")
    claim, has_begun = Claim(), Reply[bool]()  # once claimed here, the core must not resize

    def question(core: Core, now: float) -> tuple[int, Sequence[Effect]]:
        if not claim.take():
            return -1, [Answer(-1, None)]
        try:
            if why := core.why_not_resize(size):  # the mesh may be busy by now
                raise MeshUsageError(f"the mesh cannot be resized now: {why}")
            hosts.check_invited()
            note(plan, new)
        except BaseException:
            has_begun.give(False)
            raise
        has_begun.give(True)
        return core.resize(plan.layout, plan.dims, now)

    new: list[Host] = []
    try:
        if plan.new_hosts:
            new = launcher.start_more(plan.layout, plan.new_hosts)
            call_in_loop(post, lambda: hosts.invite(new))
            if code is not None:  # the zygotes of the new hosts wait for the modules
                code.forget()
                code.bring(timeout_s=FILES_S)
        report: HealReport | None = ask(question).result()
    except BaseException as error:
        if claim.take() or not has_begun.result():
            _end_new(new, launcher, hosts, post)
            if new and isinstance(error, CellmeshError) and not isinstance(error, NoMeshError):
                names = ", ".join(agent.name for agent in new)
                raise type(error)(f"{error}\n{names} did not join: the mesh is as it was") from None
        raise
    if claim.take():  # the mesh has ended before the core got the question
        _end_new(new, launcher, hosts, post)
    return report or HealReport(failure="the mesh has ended")


def _why_not_end(states: Mapping[int, RankState]) -> str:
    """Return which calls of other ranks wait on ranks that are to end; "" if none do. The core
    knows of no calls but the notebook's that wait beside other work.
    """
    calls = (
        f"{call.title} on rank {rank}"
        for rank, state in sorted(states.items())
        for call in state.waiting
        if call.run in PEER_RUNS
    )
    ending = ", ".join(dict.fromkeys(calls))
    return ending and f"it would end calls of other ranks ({ending}): cancel them, then resize"


def _end_new(new: Sequence[Host], launcher: Launcher, hosts: Connections, post: Post) -> None:
    """End agents that were started in vain, and wait a limited time for their end."""
    if new:
        with contextlib.suppress(NoMeshError):
            call_in_loop(post, hosts.turn_away)
        end_agents(msgspec.structs.replace(launcher.ticket, agents=tuple(new)), _END_S)
