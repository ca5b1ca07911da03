"""Starts a mesh: on this host, on other hosts, or on nodes of an engine such as Slurm or Ray."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ...errors import HostError, MeshUsageError, NoMeshError
from ...wire import marks
from ...wire.environment import VISIBLE
from ...wire.options import StartOptions
from ...wire.ticket import Ticket, runtime_root
from ..host_list import INVITING
from ..kernel import own_kernel
from ..meshes import free_gpus, given_gpus, own_meshes
from ..options import Options, make_options, read_project_options, working_directory
from .launch.local import (
    Launcher,
    forked,
    make_ticket,
    ranks_environment,
    spawned,
)
from .launch.prestart import MeshZygote, Prestart, own_prestart

if TYPE_CHECKING:
    from ..mesh import Mesh
    from .life import StartProgress
    from .session import Session

# Ranks outlive a restart of their notebook for this time; a script has no lease.
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
        timeout_s: time limit of the start in seconds, once nodes are available; by default 120,
            and none for hosts that announce themselves.
        on_progress: called with the progress of the start, on another thread.
        given: the options, see `StartOptions`; None for an option that is not given.

    Returns:
        The mesh, ready.

    Raises:
        MeshUsageError: an option is wrong.
        HostError: a host lacks resources that the mesh needs, or the start takes too long.
    """
    return start_from(
        own_prestart() or own_meshes().zygote(),
        num_ranks,
        timeout_s=timeout_s,
        on_progress=on_progress,
        **given,
    )


def start_from(
    waiting: Prestart | None,
    num_ranks: int | None = None,
    *,
    timeout_s: float | None = None,
    on_progress: Callable[[StartProgress], None] | None = None,
    **given: Unpack[StartOptions],
) -> Mesh:
    """Start a mesh, forked from a waiting zygote if possible; see `start`.

    Args:
        waiting: the waiting zygote; None for a start without one.
        num_ranks: number of ranks.
        timeout_s: time limit of the start in seconds.
        on_progress: called with the progress of the start, on another thread.
        given: the options.
    """
    if marks.VARIABLE in os.environ and "LOCAL_RANK" in os.environ:
        raise MeshUsageError(
            f"this process is rank {os.environ.get('RANK')} of a mesh, "
            "and cellmesh.start makes ranks itself: run the script by `python`, or on the ranks "
            "without cellmesh.start"
        )
    started_at = time.monotonic()
    checked = read_options({"num_ranks": num_ranks, **given})
    if checked.name:
        from .living import forget_if_dead

        forget_if_dead(checked.name)
    checked = _choose_gpus(checked)
    limit_s = _START_S if timeout_s is None else timeout_s
    patience_s = math.inf if timeout_s is None and checked.launch in INVITING else limit_s
    ticket, launcher, end = _launch(waiting, checked, patience_s, on_progress)
    try:
        # Only now: these imports take as long as a quarter of torch's, which is being imported.
        from ...wire.marks import end_dead_meshes
        from ...wire.modules import loaded
        from ..mesh import Mesh
        from .session import Session

        end_dead_meshes(runtime_root())
        session = Session(ticket, launcher, end, on_progress=on_progress, started_at=started_at)
    except BaseException as error:
        if isinstance(error, Exception):
            os.close(end)  # after Ctrl-C, the session may have it already
        # An agent that ends by itself would wait for this process, to report the end to it; the
        # guardian on this host ends the rest of a mesh whose agent is killed.
        launcher.signal(signal.SIGTERM if checked.hosts else signal.SIGKILL)
        launcher.wait(None)
        raise
    try:
        loaded.record()
        _bring_code(session, limit_s)
        session.wait_until_ready(limit_s)
        launcher.let_go()
    except BaseException:
        session.stop()
        raise
    from .guests import accept_guests

    mesh = Mesh(session)
    own_meshes().add(mesh)
    accept_guests(mesh)
    return mesh


def read_options(given: Mapping[str, Any]) -> Options:
    """Return the checked options of a start, completed by the project's options
    (``pyproject.toml``).

    Args:
        given: the caller's options; None for an option that is not given.

    Raises:
        MeshUsageError: an option is wrong.
        HostError: the working directory was removed.
    """
    options = read_project_options(working_directory())
    if given.get("num_ranks") is not None or given.get("mesh") is not None:
        # A size of the mesh in the call replaces both options of the project for it.
        options.pop("num_ranks", None)
        options.pop("mesh", None)
    options.update({key: value for key, value in given.items() if value is not None})
    checked = make_options(**options)
    if checked.is_lease_chosen or own_kernel() is None:
        return checked
    return msgspec.structs.replace(checked, lease_s=NOTEBOOK_LEASE_S)


def _choose_gpus(options: Options) -> Options:
    """Have a mesh see the GPUs that no other mesh of this process uses, unless the user has named
    some.
    """
    others = own_meshes()
    if not others or options.hosts or options.gpus is not None or VISIBLE in options.env:
        return options
    given = given_gpus(os.environ)
    free = free_gpus(given, others.gpus(given))
    if free is None:
        return options
    return msgspec.structs.replace(options, env={**options.env, VISIBLE: ",".join(free)})


def _import_session() -> None:
    """Import the modules that a launch does not need, which takes a quarter of an import of torch:
    in the time in which an interpreter begins for the agent.
    """
    from .. import mesh  # noqa: F401


def _bring_code(session: Session, timeout_s: float) -> None:
    """Send the user's modules to the hosts of a mesh that starts, while its processes there import
    torch.
    """
    try:
        if session.code is not None:
            session.code.bring(timeout_s=timeout_s)
    except NoMeshError:  # the start has failed, which is explained where it is awaited
        return


def _launch(
    waiting: Prestart | None,
    options: Options,
    timeout_s: float,
    on_progress: Callable[[StartProgress], None] | None,
) -> tuple[Ticket, Launcher, int]:
    """Start the agents of a mesh; fork an agent on this host from the waiting zygote, if there is
    one.

    Returns:
        The mesh's ticket, its launcher, and the file descriptor for the end of the agents
        (`Launcher.start`).
    """

    began = time.monotonic()

    def report(text: str = "importing torch") -> None:
        if on_progress is not None:
            from .life import StartProgress

            elapsed_s = time.monotonic() - began
            on_progress(StartProgress(text, 0, options.num_ranks, elapsed_s))

    if options.hosts:
        from ..output.calling_cell import current_sink
        from .launch.hosts import HostAgents

        def show(text: str, stays: bool) -> None:
            current_sink().note(text) if stays else report(text)

        ticket = make_ticket(options)
        agents = HostAgents(ticket, options.hosts, options.command, timeout_s, show)
        end = agents.start()
        return agents.ticket, agents, end
    # Variables that only ranks get may be read while torch is imported; not the one for GPUs.
    own = {name: value for name, value in ranks_environment(options).items() if name != VISIBLE}
    is_fitting = options.prestart and own.items() <= os.environ.items()
    is_script = waiting is None or isinstance(waiting, MeshZygote)
    if not is_fitting:
        waiting = None
    for _ in range(3):  # it may end at this moment, or another one may fit
        if waiting is not None and waiting.prepare(timeout_s, report, options.learns):
            ticket = make_ticket(options)
            with contextlib.suppress(HostError):  # otherwise start without it
                launcher = forked(ticket, waiting)
                break
    else:
        ticket = make_ticket(options)
        launcher = spawned(ticket, _import_session)
    if is_fitting and is_script and not options.preload and marks.VARIABLE not in os.environ:
        own_meshes().zygotes[ticket.name] = MeshZygote(ticket)
    return ticket, launcher, launcher.start()
