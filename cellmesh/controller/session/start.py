"""Starts a mesh: on this host, on other hosts, or on nodes that an engine gives."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import msgspec

from ...errors import HostError, NoMeshError
from ...wire.marks import end_dead_meshes
from ...wire.modules import loaded
from ...wire.options import StartOptions
from ...wire.ticket import Ticket, runtime_root
from ..host_list import INVITING
from ..kernel import own_kernel
from ..mesh import Mesh
from ..options import Options, make_options, read_project_options
from ..output.calling_cell import current_sink
from .hosts.standing import forget_if_ended
from .launch.hosts import HostAgents
from .launch.launcher import Launcher
from .launch.local import (
    LocalAgent,
    forked,
    make_ticket,
    ranks_environment,
    spawned,
)
from .launch.prestart import own_prestart
from .session import Session, StartProgress

# A notebook is restarted now and then, and the ranks are to be there then; a script is over when it
# ends.
NOTEBOOK_LEASE_S = 1800.0
_START_S = 120.0


def start(
    num_ranks: int | None = None,
    *,
    timeout_s: float | None = None,
    on_progress: Callable[[StartProgress], None] | None = None,
    **given: Unpack[StartOptions],
) -> Mesh:
    """Start a mesh on this machine or on other hosts, and wait until every rank is ready.

    Options that are not given come from the ``[tool.cellmesh]`` table of the nearest
    ``pyproject.toml``.

    Args:
        num_ranks: number of ranks; may be left out where the option `mesh` gives it.
        timeout_s: how long the start may take, in seconds, once there are nodes; by default 120,
            and as long as it takes for hosts that announce themselves.
        on_progress: told how far it has come; called on another thread.
        given: the options, see `StartOptions`; None where one is not given.

    Returns:
        The mesh, ready.

    Raises:
        MeshUsageError: an option is wrong.
        HostError: this machine cannot give what the mesh needs.
    """
    checked = read_options({"num_ranks": num_ranks, **given})
    end_dead_meshes(runtime_root())
    started_at = time.monotonic()
    if checked.name:
        forget_if_ended(runtime_root() / checked.name)
    limit_s = _START_S if timeout_s is None else timeout_s
    patience_s = math.inf if timeout_s is None and checked.launch in INVITING else limit_s
    ticket, launcher, end = _launch(checked, patience_s, on_progress)
    session = Session(ticket, launcher, end, on_progress=on_progress, started_at=started_at)
    try:
        loaded.record()
        _bring_code(session, limit_s)
        session.wait_until_ready(limit_s)
        launcher.let_go()
    except BaseException:
        session.stop()
        raise
    return Mesh(session)


def read_options(given: Mapping[str, Any]) -> Options:
    """Check the options of a start, with those that the project sets.

    Args:
        given: the caller's; None where one is not given.

    Raises:
        MeshUsageError: an option is wrong.
    """
    options = read_project_options(Path.cwd())
    if given.get("num_ranks") is not None or given.get("mesh") is not None:
        # What the call says of the mesh's size replaces all that the project says of it.
        options.pop("num_ranks", None)
        options.pop("mesh", None)
    options.update({key: value for key, value in given.items() if value is not None})
    checked = make_options(**options)
    if checked.is_lease_chosen or own_kernel() is None:
        return checked
    return msgspec.structs.replace(checked, lease_s=NOTEBOOK_LEASE_S)


def _bring_code(session: Session, timeout_s: float) -> None:
    """Send the hosts of a mesh that starts what they lack of the user's modules, while they import
    torch.
    """
    try:
        if session.code is not None:
            session.code.bring(timeout_s=timeout_s)
    except NoMeshError:  # the start has failed, which is explained where it is awaited
        return


def _launch(
    options: Options,
    timeout_s: float,
    on_progress: Callable[[StartProgress], None] | None,
) -> tuple[Ticket, Launcher, int]:
    """Start an agent, from the waiting zygote if this process has one."""

    def report() -> None:
        if on_progress is not None:
            on_progress(StartProgress("importing torch", 0, options.num_ranks, 0.0))

    if options.hosts:
        began = time.monotonic()

        def show(text: str, stays: bool) -> None:
            if stays:
                current_sink().note(text)
            elif on_progress is not None:
                elapsed_s = time.monotonic() - began
                on_progress(StartProgress(text, 0, options.num_ranks, elapsed_s))

        ticket = make_ticket(options)
        agents = HostAgents(ticket, options.hosts, options.command, timeout_s, show)
        end = agents.start()
        return agents.ticket, agents, end
    # Variables that only ranks get may be read while torch is imported.
    is_fitting = ranks_environment(options).items() <= os.environ.items()
    prestart = own_prestart() if options.prestart and is_fitting else None
    if prestart is not None and prestart.prepare(timeout_s, report):
        ticket = make_ticket(options)
        launcher = LocalAgent(ticket, functools.partial(forked, prestart=prestart))
        with contextlib.suppress(HostError):  # else without it
            return ticket, launcher, launcher.start()
    ticket = make_ticket(options)
    launcher = LocalAgent(ticket, spawned)
    return ticket, launcher, launcher.start()
