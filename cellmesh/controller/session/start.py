"""Starts a mesh: on this host, on other hosts, or on nodes of an engine such as Slurm or Ray."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec

from ...errors import HostError, MeshUsageError, NoMeshError
from ...wire.marks import end_dead_meshes
from ...wire.modules import loaded
from ...wire.options import StartOptions
from ...wire.ranks import describe_ranks
from ...wire.ticket import Ticket, runtime_root
from ..host_list import INVITING
from ..kernel import own_kernel, own_notebook
from ..mesh import Mesh
from ..mesh_dims import DEFAULT_DIM
from ..options import Options, make_options, read_project_options
from ..output.calling_cell import current_sink
from .launch.hosts import HostAgents
from .launch.local import (
    Launcher,
    forked,
    make_ticket,
    ranks_environment,
    spawned,
)
from .launch.prestart import own_prestart
from .life import StartProgress
from .living import (
    FoundMesh,
    advise_left,
    describe,
    end_left,
    forget_if_dead,
    left_meshes,
)
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
    checked = read_options({"num_ranks": num_ranks, **given})
    end_dead_meshes(runtime_root())
    started_at = time.monotonic()
    if checked.name:
        forget_if_dead(checked.name)
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
    """Return the checked options of a start, completed by the project's options
    (``pyproject.toml``).

    Args:
        given: the caller's options; None for an option that is not given.

    Raises:
        MeshUsageError: an option is wrong.
    """
    options = read_project_options(Path.cwd())
    if given.get("num_ranks") is not None or given.get("mesh") is not None:
        # A size of the mesh in the call replaces both options of the project for it.
        options.pop("num_ranks", None)
        options.pop("mesh", None)
    options.update({key: value for key, value in given.items() if value is not None})
    checked = make_options(**options)
    if checked.is_lease_chosen or own_kernel() is None:
        return checked
    return msgspec.structs.replace(checked, lease_s=NOTEBOOK_LEASE_S)


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
    for _ in range(2):  # it may end at this moment
        if prestart is not None and prestart.prepare(timeout_s, report, options.learns):
            ticket = make_ticket(options)
            with contextlib.suppress(HostError):  # otherwise start without it
                launcher = forked(ticket, prestart)
                return ticket, launcher, launcher.start()
    ticket = make_ticket(options)
    launcher = spawned(ticket)
    return ticket, launcher, launcher.start()


def check_same(session: Session, given: Mapping[str, Any]) -> Options:
    """Raise an error unless a start with these options would make a mesh like the running one.

    Args:
        session: session of the running mesh.
        given: the options of the start, as `start` takes them.

    Returns:
        The checked options. Those of the notebook itself, e.g. `fold_numbers`, may differ.

    Raises:
        MeshUsageError: the start would make another mesh; the text has the commands to use.
    """
    options = read_options(given)
    name, fresh = session.name, "`%dist_start ... --fresh` ends it and starts another"
    if options.num_ranks != session.num_ranks:
        raise MeshUsageError(
            f"{name} runs with {session.num_ranks} ranks, not {options.num_ranks}: "
            f"`%dist_resize {options.num_ranks}` gives it that number, {fresh}"
        )
    if _asks_other_dims(options, session.dims):
        have = ", ".join(f"{dim}={size}" for dim, size in session.dims.items())
        wanted = " ".join(f"{dim}={size}" for dim, size in options.mesh.items())
        raise MeshUsageError(
            f"{name} runs with mesh {have}: `%dist_mesh {wanted}` gives it these dims, "
            f"`%dist_restart` then renews its ranks, {fresh}"
        )
    if differing := differences(options, session.ticket):
        raise MeshUsageError(f"{name} runs with {'; '.join(differing)}: {fresh}")
    return options


def settle_left(given: Mapping[str, Any], is_fresh: bool, show: Callable[[str], None]) -> None:
    """Before a start, show the user the meshes that this notebook has left running, or end those
    that are like the new one. Blocks.

    Args:
        given: the options of the start, as `start` takes them.
        is_fresh: whether to end the meshes that are like the one to start.
        show: shows a line.

    Raises:
        MeshUsageError: a mesh is like the one to start, and is not to be ended; the text has the
            commands to use.
    """
    left = left_meshes(asks=True)
    same = find_same(given, left)
    if same and not is_fresh:
        raise offer_left(same)
    for mesh in left:
        if mesh in same:
            end_left(mesh)
        show(f"{mesh.name} has ended" if mesh in same else advise_left(mesh))


def find_same(given: Mapping[str, Any], left: Sequence[FoundMesh]) -> list[FoundMesh]:
    """Return the meshes of this notebook that are like the one that a start would make.

    Args:
        given: the options of the start, as `start` takes them.
        left: the meshes that live on without a controller.
    """
    notebook = own_notebook()
    own = [mesh for mesh in left if mesh.is_of(notebook)]
    if not own:
        return []
    options = read_options(given)
    return [mesh for mesh in own if _is_same(options, mesh.ticket)]


def offer_left(same: Sequence[FoundMesh]) -> MeshUsageError:
    """Return the error of a start that is refused as a mesh like the new one still runs; it has the
    commands to use instead.

    Args:
        same: meshes like the one to start (`find_same`).
    """
    it, name = "it" if len(same) == 1 else "them", same[-1].name
    lives = "\n".join(describe(mesh, time.time()) for mesh in same)
    return MeshUsageError(
        f"{lives}.\n`%dist_attach {name}` has it again with what its ranks hold, `%dist_start ... "
        f"--fresh` ends {it} and starts another, `%dist_start ... --name NAME` starts another "
        f"beside {it}"
    )


def _is_same(options: Options, ticket: Ticket) -> bool:
    dims = dict(zip(ticket.mesh_dim_names, ticket.mesh_shape, strict=False))
    has_size = options.num_ranks == ticket.num_ranks
    return has_size and not _asks_other_dims(options, dims) and not differences(options, ticket)


def _asks_other_dims(options: Options, dims: Mapping[str, int]) -> bool:
    # Default dims are no request of the user, and `%dist_mesh` may have changed them since.
    wanted = dict(options.mesh)
    return tuple(wanted) != (DEFAULT_DIM,) and wanted != dict(dims)


def differences(options: Options, ticket: Ticket) -> list[str]:
    """Return a clause for each option, except the number of ranks, in which a mesh differs from the
    options of a start.

    Args:
        options: options of the start.
        ticket: ticket of the mesh.
    """
    hosts = tuple(entry.name for entry in options.hosts)
    agents = tuple(agent.name for agent in ticket.agents)
    if hosts and not any(hosts):  # the hosts choose their own names
        hosts = agents
    pairs = {
        "--backend": (ticket.backend, options.backend),
        "--preload": (",".join(ticket.preload), ",".join(options.preload)),
        "--name": (ticket.name, options.name or ticket.name),
        "--settle": (ticket.settle_s, options.settle_s),
        "--auto-heal": (ticket.auto_heal, options.auto_heal),
        "--lease": (f"{ticket.lease_s:g}s", f"{options.lease_s:g}s"),
        "--hosts": (",".join(agents), ",".join(hosts)),
    }
    found = [
        f"{option} {_word(has)}, not {_word(wanted)}"
        for option, (has, wanted) in pairs.items()
        if has != wanted
    ]
    if ticket.gpus != options.gpus:
        found.append("other --gpus")
    if ticket.env != ranks_environment(options):  # values may be secret
        found.append("other --env")
    return found


def describe_kept(mesh: Mesh) -> str:
    """Return a sentence for users on a running mesh that is kept in place of a new one."""
    dead = sorted(mesh.rank_set.session.dead_ranks)
    text = f"{len(mesh)} ranks are running and kept; `%dist_restart` renews them"
    verb, it = ("is", "it") if len(dead) == 1 else ("are", "them")
    died = f"; {describe_ranks(dead)} {verb} dead: `%dist_heal` replaces {it}"
    return text + died if dead else text


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"
