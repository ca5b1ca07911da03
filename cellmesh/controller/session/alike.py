"""Compares meshes that run or were left running with the mesh that a start would make."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import MeshUsageError
from ...wire.environment import VISIBLE
from ...wire.mesh_dims import DEFAULT_DIM
from ...wire.ranks import describe_ranks, in_words
from ...wire.ticket import Ticket
from ..kernel import own_notebook
from ..mesh import Mesh
from ..options import Options
from .launch.local import ranks_environment
from .living import FoundMesh, advise_left, describe, end_left, left_meshes
from .session import Session
from .start import read_options

_GENERATED = re.compile(r"mesh-\d+-[0-9a-f]{4}")  # as `launch.local.make_ticket` does


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
            f"`%dist_resize {options.num_ranks}` gives it that number, {fresh}, `%dist_start "
            f"{options.num_ranks} --name NAME` starts one beside it"
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


def name_of_same(given: Mapping[str, Any], held: Sequence[str]) -> str:
    """Return the name of the mesh that a start with these options is about, among those that the
    notebook has; "" if it is about a new one.

    A start with a name is about the mesh of that name. One without is about the mesh that was
    started without a name, else about the one in use, as `%dist_start 4` twice keeps the mesh.

    Args:
        given: the options of the start, as `start` takes them.
        held: names of the notebook's meshes; the one in use is last.
    """
    if name := read_options(given).name:
        return name if name in held else ""
    return next((each for each in reversed(held) if _GENERATED.fullmatch(each)), held[-1])


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
    same = [mesh for mesh in own if _is_same(options, mesh.ticket)]
    unnamed = [mesh for mesh in same if _GENERATED.fullmatch(mesh.name)]
    return same if options.name else unnamed or same


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
        "--group": (ticket.group, options.group),
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
    has, wanted = dict(ticket.env), ranks_environment(options)
    if ticket.gpus is None and VISIBLE not in wanted:  # a start beside another mesh has chosen
        has.pop(VISIBLE, None)
    if has != wanted:  # values may be secret
        found.append("other --env")
    return found


def describe_kept(mesh: Mesh) -> str:
    """Return a sentence for users on a running mesh that is kept in place of a new one."""
    dead = sorted(mesh.rank_set.session.dead_ranks)
    are, them = ("is", "it") if len(mesh) == 1 else ("are", "them")
    text = f"{in_words(len(mesh))} {are} running and kept; `%dist_restart` renews {them}"
    verb, it = ("is", "it") if len(dead) == 1 else ("are", "them")
    died = f"; {describe_ranks(dead)} {verb} dead: `%dist_heal` replaces {it}"
    return text + died if dead else text


def describe_ready(mesh: Mesh) -> str:
    """Return a line for users on a mesh that has started: its ranks, backend, devices and dims."""
    backends = sorted({info.backend for info in mesh.ready_ranks})
    devices = sorted({info.device.partition(":")[0] for info in mesh.ready_ranks})
    dims = ", ".join(f"{name}={size}" for name, size in mesh.dims.items())
    ready, where = f"{in_words(len(mesh))} ready in {mesh.start_s:.1f} s", ", ".join(devices)
    if not dims:
        return f"{ready}: on {where}, no process group"
    return f"{ready}: {', '.join(backends)} on {where}, mesh {dims}"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"
