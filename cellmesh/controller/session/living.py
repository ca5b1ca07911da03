"""Living meshes of this user, which a notebook can list, attach to or end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ...errors import MeshUsageError
from ...wire.attach import RunInfo
from ...wire.host import format_span, is_process, this_place
from ...wire.ranks import describe_ranks
from ...wire.ticket import (
    Holder,
    Ticket,
    find_tickets,
    read_holder,
    remove_own_directory,
    runtime_root,
)
from ..kernel import own_notebook
from .launch.local import LocalAgent, found
from .standing import HostStanding, ask_agents, end_on_hosts, summarize

_STOP_S = 5.0
_MAX_RUNS = 2  # most runs of a mesh that are named


@dataclass(frozen=True)
class LivingMesh:
    """A mesh that lives, or may live on hosts that were not asked.

    Attributes:
        ticket: its ticket.
        holder: the process that holds it, or held it last; None if that is not known.
        runs: its runs in flight; () if its agents were not asked.
    """

    ticket: Ticket
    holder: Holder | None
    runs: tuple[RunInfo, ...] = ()

    @property
    def name(self) -> str:
        """The name of the mesh."""
        return self.ticket.name

    @property
    def is_free(self) -> bool:
        """Whether no process holds the mesh; without an answer of its agents, whether the process
        that started it has ended.
        """
        if self.holder is not None:
            return not self.holder.is_attached
        is_elsewhere = self.ticket.place != this_place()
        starter = Path(f"/proc/{self.ticket.controller_pid}")
        return self.ticket.spans_hosts and not is_elsewhere and not starter.exists()

    @property
    def notebook(self) -> str:
        """The path of the notebook that holds the mesh, or held it last (`kernel.own_notebook`)."""
        return self.ticket.notebook if self.holder is None else self.holder.notebook

    def is_of(self, notebook: str) -> bool:
        """Return whether a notebook holds the mesh, or held it last."""
        return bool(notebook) and self.notebook == notebook


def find_living(asks: bool) -> list[LivingMesh]:
    """Return the living meshes of this user, oldest first.

    Args:
        asks: whether to ask agents for their runs, and agents on other hosts whether they live;
            else only files are read.
    """
    living = []
    for ticket in find_tickets(runtime_root()):
        if not _may_live(ticket):
            continue
        standings = ask_agents(ticket) if asks else []
        holder = summarize(standings)
        if ticket.spans_hosts and asks and holder is None:
            continue
        if holder is None and not ticket.spans_hosts:
            holder = read_holder(ticket)
        living.append(LivingMesh(ticket, holder, _runs_of(standings)))
    return living


def left_meshes(asks: bool) -> list[LivingMesh]:
    """Return the meshes without a controller that this notebook may have left: its own, and those
    that were started in its folder, unless they are another notebook's.

    Args:
        asks: whether to ask the agents of a mesh on many hosts; for one host, files suffice.
    """
    own = own_notebook()
    left = [mesh for mesh in find_living(asks=False) if mesh.is_free and _is_near(mesh, own)]
    if asks and any(mesh.ticket.spans_hosts for mesh in left):
        names = {mesh.name for mesh in left}
        return [mesh for mesh in find_living(asks=True) if mesh.name in names and mesh.is_free]
    return left


def describe_left(mesh: LivingMesh) -> str:
    """Return a clause for users on a mesh that lives on without a controller."""
    ticket, now = mesh.ticket, time.time()
    whose = "of this notebook" if mesh.is_of(own_notebook()) else "started in this folder"
    ranks = "1 rank" if ticket.num_ranks == 1 else f"{ticket.num_ranks} ranks"
    age = f"started {format_span(now - ticket.created_at)} ago"
    if ticket.spans_hosts:
        hosts = ", ".join(agent.name for agent in ticket.agents)
        return f"{mesh.name}, {whose}, may live on: {ranks} on {hosts}, {age}"
    memory = memory_bytes([ticket.agent_pid, *children_of(ticket.agent_pid)])
    since = now if mesh.holder is None else mesh.holder.since
    left = format_span(max(0.0, since + ticket.lease_s - now))
    return f"{mesh.name}, {whose}, lives on for {left}: {ranks}, {memory / 1e6:,.0f} MB, {age}"


def advise_left(mesh: LivingMesh) -> str:
    """Return a line for users on a mesh that lives on, with commands to attach to it or end it."""
    return (
        f"{describe_left(mesh)}; `%dist_attach {mesh.name}` has it again, `%dist_stop "
        f"{mesh.name}` ends it"
    )


def choose(living: Sequence[LivingMesh], steal: bool) -> LivingMesh | None:
    """Return the mesh for an attach without a name: the only one, else the only free one of this
    notebook, else the only free one; None if there is no such mesh.

    Args:
        living: the meshes.
        steal: whether to choose a mesh that a process holds instead of a free one.
    """
    if len(living) == 1:
        return living[0]
    fit = [mesh for mesh in living if mesh.is_free != steal]
    own = own_notebook()
    for candidates in ([mesh for mesh in fit if mesh.is_of(own)], fit):
        if len(candidates) == 1:
            return candidates[0]
    return None


def table_of(living: Sequence[LivingMesh], now: float) -> str:
    """Return a table of meshes as text: name, ranks, age, notebook, holder, runs."""
    rows = [("NAME", "RANKS", "AGE", "NOTEBOOK", "HELD BY", "RUNS")]
    for mesh in living:
        ticket = mesh.ticket
        age = format_span(max(0.0, now - ticket.created_at))
        rows.append(
            (mesh.name, str(ticket.num_ranks), age, _place(mesh), _hold(mesh, now), _running(mesh))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def end_left(mesh: LivingMesh) -> None:
    """End a mesh that no process holds. Blocks.

    Raises:
        MeshUsageError: another process holds it.
        HostError: some of its hosts did not answer.
    """
    name, ticket = mesh.name, mesh.ticket
    if mesh.holder is not None and mesh.holder.is_attached:
        raise MeshUsageError(
            f"{name} is held by {_hold(mesh, time.time())}: `%dist_attach --steal {name}` takes "
            f"it, `cellmesh stop {name}` in a terminal ends it all the same"
        )
    if ticket.spans_hosts:
        end_on_hosts(ticket, _STOP_S)
        return
    agent = LocalAgent(ticket, found)
    os.close(agent.start())
    agent.signal(signal.SIGTERM)
    if not agent.wait(_STOP_S):
        agent.signal(signal.SIGKILL)
        agent.wait(None)
    remove_own_directory(ticket)


def _may_live(ticket: Ticket) -> bool:
    if ticket.spans_hosts:
        return bool(ticket.agents)
    is_here = ticket.host is None and ticket.place == this_place()
    return is_here and is_process(ticket.agent_pid, ticket.agent_ticks)


def _runs_of(standings: Sequence[HostStanding]) -> tuple[RunInfo, ...]:
    """Return the runs in flight, each with its ranks on all hosts."""
    runs: dict[int, RunInfo] = {}
    for each in standings:
        for info in each.standing.runs if each.standing is not None else ():
            before = runs[info.run].ranks if info.run in runs else ()
            ranks = tuple(sorted({*before, *info.ranks}))
            runs[info.run] = msgspec.structs.replace(info, ranks=ranks)
    return tuple(runs.values())


def _is_near(mesh: LivingMesh, own: str) -> bool:
    if mesh.is_of(own):
        return True
    if _is_named(own) and _is_named(mesh.notebook):
        return False
    try:
        return mesh.ticket.cwd == os.getcwd()
    except OSError:  # it was removed
        return False


def _is_named(notebook: str) -> bool:
    """Return whether a name is a notebook's path, not a kernel's connection file or empty."""
    return bool(notebook) and not notebook.endswith(".json")


def _place(mesh: LivingMesh) -> str:
    is_named = _is_named(mesh.notebook)
    path = Path(mesh.notebook if is_named else mesh.ticket.cwd)
    try:
        path = "~" / path.relative_to(Path.home())
    except (ValueError, RuntimeError):  # it is elsewhere, or there is no home
        pass
    return str(path) if is_named else f"in {path}"


def _hold(mesh: LivingMesh, now: float) -> str:
    holder = mesh.holder
    if holder is None:
        return f"process {mesh.ticket.controller_pid}"
    if not holder.is_attached:
        return f"nobody for {format_span(max(0.0, now - holder.since))}"
    if holder.controller_pid == os.getpid():
        return "this process"
    where = f" on {holder.host}" if mesh.ticket.spans_hosts and holder.host else ""
    return f"process {holder.controller_pid}{where}"


def _running(mesh: LivingMesh) -> str:
    runs = [f"{info.title or 'a call'} on {describe_ranks(info.ranks)}" for info in mesh.runs]
    more = f", {len(runs) - _MAX_RUNS} more" if len(runs) > _MAX_RUNS else ""
    return ", ".join(runs[:_MAX_RUNS]) + more or "nothing"


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes, shared pages counted once (PSS); RSS where PSS cannot be
    read.

    Args:
        pids: process ids; processes that have ended do not count.
    """
    total = 0
    for pid in pids:
        try:
            total += _pss_bytes(pid)
        except (OSError, ValueError):
            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
    return total


def children_of(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process; none if it has ended."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == "Pss":
                return int(rest.split()[0]) * 1024
    raise ValueError("no Pss in smaps_rollup")
