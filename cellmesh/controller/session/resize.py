"""Resizes a mesh: starts agents on hosts that join, then has the core decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ...errors import MeshUsageError
from ...wire.hosts import AgentAddress
from ..code_files.sync import CodeSync
from ..core.core import Answer, Core, Effect, HealReport
from ..resizing import Resizing
from .hosts.connections import HostConnections
from .launch.hosts import HostAgents
from .launch.launcher import Launcher

Question = Callable[[Core, float], tuple[int, Sequence[Effect]]]


def resize(
    plan: Resizing,
    core: Core,
    ask: Callable[[Question], Future[Any]],
    launcher: Launcher,
    hosts: HostConnections | None,
    note: Callable[[Resizing, Sequence[AgentAddress]], None],
    code: CodeSync | None,
) -> HealReport:
    """Resize a mesh as planned. Blocks.

    Args:
        plan: what the mesh becomes.
        core: of the mesh.
        ask: has the link's loop ask the core a question; the future gets the answer.
        launcher: starts agents on hosts that join.
        hosts: the connections to all hosts; None for a mesh on this machine.
        note: called in the link's loop once nothing speaks against the new size.
        code: keeps the user's modules the same on all hosts.

    Raises:
        MeshUsageError: ranks run something, or are dead; nothing has changed.
        HostError: an agent could not be started; nothing has changed.
    """
    size = sum(plan.layout)
    if why := core.why_not_resize(size):
        raise MeshUsageError(f"the mesh cannot be resized now: {why}")
    new: list[AgentAddress] = []
    if isinstance(launcher, HostAgents):
        new = launcher.start_more(plan.layout, plan.new_hosts)

    def question(core: Core, now: float) -> tuple[int, Sequence[Effect]]:
        why = core.why_not_resize(size)  # it may have begun something in the meantime
        if hosts is not None:
            (hosts.turn_away if why else hosts.add)(new)
        if why:
            return -1, [Answer(-1, why)]
        note(plan, new)
        return core.resize(plan.layout, plan.dims, now)

    asked = ask(question)
    if new and code is not None:  # whose zygotes wait for the modules
        code.forget()
        code.bring()
    answer: HealReport | str | None = asked.result()
    if isinstance(answer, str):
        raise MeshUsageError(f"the mesh cannot be resized now: {answer}")
    return answer or HealReport(failure="the mesh has ended")
