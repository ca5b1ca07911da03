"""Resizes a mesh: starts agents on hosts that join and sends them the user's modules, then has the
core decide. Until it has, whatever fails leaves the mesh as it was, and ends the new agents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from ...errors import CellmeshError, MeshUsageError, NoMeshError
from ...wire.hosts import AgentAddress
from ..code_files.sync import CodeSync
from ..core.core import Answer, Core, Effect, HealReport
from ..news import Reply
from ..resizing import Resizing
from .hosts.answers import FILES_S
from .hosts.connections import Connections
from .hosts.standing import end_agents
from .hosts.start import Post, call_in_loop
from .launch.launcher import Launcher

Question = Callable[[Core, float], tuple[int, Sequence[Effect]]]

# How long the end of agents that are not used is awaited; the link ends later ones once it hears
# them.
_END_S = 10.0


def resize(
    plan: Resizing,
    core: Core,
    ask: Callable[[Question], Reply[Any]],
    post: Post,
    launcher: Launcher,
    hosts: Connections,
    note: Callable[[Resizing, Sequence[AgentAddress]], None],
    code: CodeSync | None,
) -> HealReport:
    """Resize a mesh as planned. Blocks.

    Args:
        plan: what the mesh becomes.
        core: of the mesh.
        ask: has the link's loop ask the core a question; the future gets the answer.
        post: gives the link's loop a command.
        launcher: starts agents on hosts that join.
        hosts: the connections to all hosts.
        note: called in the link's loop once nothing speaks against the new size.
        code: keeps the user's modules the same on all hosts.

    Raises:
        MeshUsageError: ranks run something, or are dead; nothing has changed.
        HostError: a new host cannot be used; nothing has changed.
    """
    size = sum(plan.layout)
    if why := core.why_not_resize(size):
        raise MeshUsageError(f"the mesh cannot be resized now: {why}")
    has_begun: Future[bool] = Future()  # cancelled if the core must not resize any more

    def question(core: Core, now: float) -> tuple[int, Sequence[Effect]]:
        if not has_begun.set_running_or_notify_cancel():
            return -1, [Answer(-1, None)]
        try:
            if why := core.why_not_resize(size):  # it may have begun something by now
                raise MeshUsageError(f"the mesh cannot be resized now: {why}")
            hosts.check_candidates()
            note(plan, new)
        except BaseException:
            has_begun.set_result(False)
            raise
        has_begun.set_result(True)
        return core.resize(plan.layout, plan.dims, now)

    new: list[AgentAddress] = []
    try:
        if plan.new_hosts:
            new = launcher.start_more(plan.layout, plan.new_hosts)
            call_in_loop(post, lambda: hosts.invite(new))
            if code is not None:  # whose zygotes wait for the modules
                code.forget()
                code.bring(timeout_s=FILES_S)
        report: HealReport | None = ask(question).result()
    except BaseException as error:
        if has_begun.cancel() or not has_begun.result():
            _end_new(new, launcher, hosts, post)
            if new and isinstance(error, CellmeshError) and not isinstance(error, NoMeshError):
                names = ", ".join(agent.host for agent in new)
                raise type(error)(f"{error}\n{names} did not join: the mesh is as it was") from None
        raise
    if has_begun.cancel():  # the mesh has ended before the question
        _end_new(new, launcher, hosts, post)
    return report or HealReport(failure="the mesh has ended")


def _end_new(
    new: Sequence[AgentAddress], launcher: Launcher, hosts: Connections, post: Post
) -> None:
    """End agents that were started and are not used, and wait for that a while."""
    if new:
        with contextlib.suppress(NoMeshError):
            call_in_loop(post, hosts.turn_away)
        if not end_agents(msgspec.structs.replace(launcher.ticket, agents=tuple(new)), _END_S):
            launcher.forget(new)
