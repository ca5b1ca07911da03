"""Tickets: the file with a mesh's keys and options, by which other processes find the mesh; and the
file beside it in which the agent records the mesh's controller.

Every mesh has a directory of mode 0700 under Jupyter's runtime directory::

    cellmesh/<name>/ticket.json   mode 0600: the key, the processes, the options of the start
                   /holder.json   its controller, or the time since when it has none
                   /agent.sock    the agent's socket for controllers
                   /logs/         rank0.log ...; agent.log, zygote.log

A process that may read the ticket may run code on the ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import HostError
from .host import Place, own_python, own_torch, own_version, this_place
from .hosts import Host, HostPart, Invitation
from .options import MeshOptions
from .own_file import Secret, cannot_write, from_json, is_others, read_own_file, write_whole

# sun_path holds 108 bytes; "/agent.sock" and a NUL must still fit.
_MAX_DIRECTORY_BYTES = 108 - len("/agent.sock") - 1
# A directory without a ticket may belong to a mesh that is just starting.
_STARTING_S = 60.0
_FILE = "ticket.json"


class Ticket(MeshOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options (`MeshOptions`) and the key of one mesh.

    Attributes:
        name: name of the mesh and of its directory.
        key: shared secret (hex) that authenticates controllers to the agent.
        directory: directory of the mesh.
        num_ranks: number of ranks.
        mesh_dim_names: names of the DeviceMesh's dims.
        mesh_shape: sizes of the DeviceMesh's dims.
        sys_path: the notebook's ``sys.path``.
        cwd: the notebook's working directory.
        controller_pid: process id of the mesh's first controller, which starts it.
        created_at: time of creation, in seconds since the epoch.
        version: version of cellmesh.
        python: version of Python.
        torch: version of torch in the notebook.
        place: host, boot and PID namespace of its processes.
        mark: mark in the environment of the mesh's processes (`marks`).
        agent_pid: process id of the agent, 0 until it runs.
        agent_ticks: start time of the agent (`host.started_ticks`).
        host: the agent's part of a mesh on many hosts; None if the mesh is on one host.
        parts: parts of all hosts, of which an agent takes the one with its host's number; () if the
            ticket has its own (`host`).
        job: job of the engine that has started the agents; "" without a job.
        agents: addresses of the agents of a mesh on many hosts; () on one host.
        agents_revision: number of changes of the agents so far (replaced, or resized).
        num_resizes: number of changes of the number of ranks so far.
        replaced: agents that were replaced by others, and may not know it yet.
        roots: directories of the user's modules, which all hosts get; () on one host.
        notebook_path: on another host, the notebook's ``sys.path``; `sys_path` then has its
            directories that exist on the host, and the host's own.
        curve_secret: CURVE's secret key of this ticket's owner (Z85): an agent, or controllers.
        invitation: invitation for hosts that announce themselves; None without such hosts.
        invitation_secret: CURVE's secret key of the listener that they connect to (Z85).
        learned: modules that the project's ranks import, for a zygote that is started anew.
        learned_list: path of the list that they are from (`preload`); "" if none is kept.
        notebook: notebook that started the mesh (`kernel.own_notebook`); "" for a script.
    """

    name: str
    key: Secret
    directory: str
    num_ranks: int
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    sys_path: tuple[str, ...]
    cwd: str
    controller_pid: int
    created_at: float
    version: str = msgspec.field(default_factory=own_version)
    python: str = msgspec.field(default_factory=own_python)
    torch: str = msgspec.field(default_factory=own_torch)
    place: Place = msgspec.field(default_factory=this_place)
    mark: str = msgspec.field(default_factory=lambda: os.urandom(8).hex())
    agent_pid: int = 0
    agent_ticks: int = 0
    host: HostPart | None = None
    parts: tuple[HostPart, ...] = ()
    job: str = ""
    agents: tuple[Host, ...] = ()
    agents_revision: int = 0
    num_resizes: int = 0
    replaced: tuple[Host, ...] = ()
    roots: tuple[str, ...] = ()
    notebook_path: tuple[str, ...] = ()
    curve_secret: Secret = Secret("")
    invitation: Invitation | None = None
    invitation_secret: Secret = Secret("")
    notebook: str = ""
    learned: tuple[str, ...] = ()
    learned_list: str = ""

    def __repr__(self) -> str:
        return f"<Ticket of {self.name}>"  # its variables may be secret

    @property
    def agent_endpoint(self) -> str:
        """The ZeroMQ endpoint (a socket file) on which the agent of a mesh on one host serves
        controllers.
        """
        return f"ipc://{self.directory}/agent.sock"

    @property
    def layout(self) -> tuple[int, ...]:
        """Number of ranks of each host, for the hosts that the ticket names."""
        return tuple(agent.num_ranks for agent in self.all_agents)

    @property
    def all_agents(self) -> tuple[Host, ...]:
        """The mesh's agents, one per host; the agent of a mesh on one host has a socket file as its
        endpoint, and no keys.
        """
        own = Host("", self.agent_endpoint, "", 0, self.num_ranks)
        return self.agents or (own,)

    @property
    def spans_hosts(self) -> bool:
        """Whether this is a controller's ticket of a mesh on many hosts."""
        return bool(self.curve_secret) and self.host is None

    @property
    def ranks(self) -> range:
        """The ranks that run under the agent with this ticket."""
        return range(self.part.first_rank, self.part.first_rank + self.part.num_ranks)

    @property
    def part(self) -> HostPart:
        """The part of the mesh that the agent with this ticket runs: one host's ranks, or all ranks
        of a mesh on this machine.
        """
        return self.host or HostPart(0, 1, "", 0, self.num_ranks, "")

    @property
    def path(self) -> Path:
        """The path of ``ticket.json``, the file with the mesh's options and keys."""
        return Path(self.directory) / _FILE

    @property
    def holder_path(self) -> Path:
        """The path of the file that names the mesh's controller (`Holder`)."""
        return Path(self.directory) / "holder.json"

    @property
    def logs(self) -> Path:
        """The directory with the logs of the mesh's agent and ranks."""
        return Path(self.directory) / "logs"


def path_of_ranks(ticket: Ticket, places: Sequence[str]) -> tuple[str, ...]:
    """Return the `sys.path` of ranks on another host than the notebook's: the notebook's
    directories that exist on the host, then the host's own.

    Args:
        ticket: ticket of the host's agent.
        places: directories of the modules of `Ticket.roots` on the host; () if they are not sent.
    """
    placed = dict(zip(ticket.roots, places, strict=False))
    theirs = [placed.get(path, path) for path in ticket.notebook_path]
    there = [path for path in theirs if path in places or os.path.isdir(path)]
    return tuple(dict.fromkeys([*there, *ticket.sys_path]))


class _Head(msgspec.Struct, frozen=True):
    """The fields that tickets of every version have, read first to check the version."""

    version: str = ""
    agent_pid: int = 0


def new_key() -> Secret:
    """Return a new secret of 256 random bits, in hex."""
    return Secret(os.urandom(32).hex())


def runtime_root() -> Path:
    """Return the directory that holds all meshes of this user.

    Jupyter's runtime directory, or, where that is too long for a socket's address, one under the
    temporary directory with the user's id in its name.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    root = Path(jupyter_runtime_dir()) / "cellmesh"
    if len(os.fsencode(root)) + len("/mesh-4294967-zzzz") <= _MAX_DIRECTORY_BYTES:
        return root
    import tempfile  # imports random and hashlib, and no agent needs it

    return Path(tempfile.gettempdir()) / f"cellmesh-{os.getuid()}"


def make_directory(root: Path, name: str) -> Path:
    """Make a mesh's directory, for its ticket, socket and logs.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
        name: name of the mesh.

    Returns:
        The directory, mode 0700, with ``logs`` in it.

    Raises:
        HostError: the directory cannot be made, or another user owns the root.
    """
    directory = root / name
    if len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES:
        raise HostError(
            f"{directory} is too long for a socket's address (at most {_MAX_DIRECTORY_BYTES} "
            "bytes): choose a shorter --name or a shorter JUPYTER_RUNTIME_DIR"
        )
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Under /tmp the root may be another user's link to another directory of this user's. Once
        # it is seen to be this user's, no other user can replace it there.
        is_own_link = stat.S_ISLNK((link := root.lstat()).st_mode) and link.st_uid == os.getuid()
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if is_own_link else os.O_NOFOLLOW)
        descriptor = os.open(root, flags)
        try:
            if is_others(os.fstat(descriptor)):
                raise _foreign_root(root)
            os.mkdir(name, 0o700, dir_fd=descriptor)
            os.mkdir(f"{name}/logs", 0o700, dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except FileExistsError as e:
        raise _in_the_way(root / os.fsdecode(e.filename), name) from e
    except OSError as e:
        if os.path.islink(root):
            raise _foreign_root(root) from e
        raise cannot_write(directory, e) from e
    return directory


def write_ticket(ticket: Ticket) -> Path:
    """Write a ticket to its file, atomically and with mode 0600; return the file's path.

    Raises:
        HostError: the file cannot be written.
    """
    write_whole(ticket.path, ticket)
    return ticket.path


def read_ticket(path: Path) -> Ticket:
    """Read a mesh's ticket from its file.

    Raises:
        HostError: the file cannot be read, is no ticket or one of another version, or others may
            read it.
    """
    text = read_own_file(path)
    try:
        head = from_json(text, _Head)
        if head.version not in ("", own_version()):
            raise HostError(
                f"{path} is of cellmesh {head.version}, and this is {own_version()}: use that "
                "version"
                + (f", or end the mesh (`kill {head.agent_pid}`)" if head.agent_pid else "")
            )
        return from_json(text, Ticket)
    except ValueError as e:
        raise HostError(f"{path} is no ticket of this version of cellmesh: {e}") from e


def find_strange(root: Path) -> list[tuple[Path, str]]:
    """Return the directories under a root that have no usable ticket, each with a description of
    the problem.

    Args:
        root: directory of all meshes, as `runtime_root` returns it.
    """
    try:
        directories = sorted(root.iterdir())
    except PermissionError:
        why = f"{root} is another user's: set JUPYTER_RUNTIME_DIR or HOME to a directory of yours"
        return [(root, why)]
    except OSError:  # this user has had no mesh
        directories = []
    strange = []
    for directory in directories:
        try:
            read_ticket(directory / _FILE)
        except HostError as error:
            try:
                age_s = time.time() - directory.stat().st_mtime
                is_there = os.path.lexists(directory / _FILE)
            except OSError:  # it has just been removed
                continue
            if is_there or age_s > _STARTING_S:
                strange.append((directory, str(error)))
    return strange


def find_tickets(root: Path) -> list[Ticket]:
    """Return the tickets of meshes under a root directory that can be used, oldest first (others:
    `find_strange`).
    """
    by_mark = {}  # a mesh may be found twice, by a link
    paths: list[Path] = []
    with contextlib.suppress(PermissionError):  # the root is another user's
        paths += root.glob(f"*/{_FILE}")
    for path in paths:
        try:
            ticket = read_ticket(path)
        except HostError:
            continue
        by_mark[ticket.mark] = ticket
    return sorted(by_mark.values(), key=lambda ticket: ticket.created_at)


def remove_directory(directory: Path) -> None:
    """Remove a mesh's directory and its content.

    The ticket is removed last: if this process is killed, another one that finds the ticket
    continues.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _FILE:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _in_the_way(path: Path, name: str) -> HostError:
    try:
        ticket = read_ticket(path / _FILE)
    except HostError:
        return HostError(f"{path} is in the way: choose another name, or look at it")
    process = f"process {ticket.agent_pid}" if ticket.agent_pid else "about to start"
    return HostError(
        f"a mesh of the name {name} lives ({process}): `%dist_attach {name}` finds it, "
        f"`cellmesh stop {name}` ends it, and `--name` gives the new one another"
    )


def _foreign_root(root: Path) -> HostError:
    return HostError(
        f"{root} must belong to you alone (mode 0700): `chmod 700 {root}`, or set "
        "JUPYTER_RUNTIME_DIR to a directory of yours"
    )


def remove_own_directory(ticket: Ticket) -> bool:
    """Remove a mesh's directory, unless another mesh of that name uses it now; return whether the
    directory was removed.
    """
    try:
        if read_ticket(ticket.path).mark != ticket.mark:
            return False
    except (
        HostError
    ):  # another process has removed it, and may have been killed before the last step
        with contextlib.suppress(OSError):  # that is done here, if nothing else is in the directory
            os.rmdir(ticket.directory)
        return False
    remove_directory(Path(ticket.directory))
    return not os.path.lexists(ticket.directory)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The present or last controller of a mesh, as the agent writes it to a file.

    Attributes:
        controller_pid: process id of the controller that is attached, or was last.
        is_attached: whether this controller is attached.
        since: time when it attached or detached, in seconds since the epoch.
        host: host of the controller.
        notebook: notebook of the controller, as in `Ticket`.
        num_refused: number of peers without a key that the agent has refused since its start.
        refused_at: time when it refused the last of them, in seconds since the epoch.
    """

    controller_pid: int
    is_attached: bool
    since: float
    host: str = ""
    notebook: str = ""
    num_refused: int = 0
    refused_at: float = 0.0


def write_holder(ticket: Ticket, holder: Holder) -> None:
    """Write the file that names a mesh's controller.

    Raises:
        HostError: the file cannot be written.
    """
    write_whole(ticket.holder_path, holder)


def read_holder(ticket: Ticket) -> Holder | None:
    """Read from its file which controller a mesh has, or had last; None if the agent has not
    written it yet.
    """
    try:
        return msgspec.json.decode(read_own_file(ticket.holder_path), type=Holder)
    except (HostError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def add_refused(ticket: Ticket, number: int) -> None:
    """Add to the number of refused peers in the file that `cellmesh ps` reads; leave the file as it
    is if the disk is full.

    Args:
        ticket: ticket of a mesh on many hosts.
        number: number of further refused peers.
    """
    holder = read_holder(ticket) or Holder(
        controller_pid=os.getpid(), is_attached=True, since=time.time()
    )
    num_refused = holder.num_refused + number
    with contextlib.suppress(HostError):
        write_holder(
            ticket,
            msgspec.structs.replace(holder, num_refused=num_refused, refused_at=time.time()),
        )
