"""A zygote (a process that has imported torch and waits to be forked) in the background of a
notebook or of a user's shells, so that a mesh starts without an import of torch.

`%load_ext cellmesh` starts a notebook's; a mesh that is started in the same process is forked from
it (`workers.prestart`), and it is kept for the next one. That of shells is left by the first
``cellmesh run``, and later ones find it by its socket (`wire.waiting`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire import marks, waiting
from ....wire.environment import SET_BY_TORCH
from ....wire.host import Process, own_version
from ....wire.marks import StartMesh, argument
from ....wire.own_file import SecretBytes, open_own_directory
from ....wire.process import absolute, isolated_command, wait_readable
from ....wire.ticket import Ticket, runtime_root
from ...kernel import own_shell
from ...options import read_project_options
from ...preload import learned_modules, own_list

# How long a zygote waits while none of its meshes lives.
KEEP_S = 600.0
# Forks take milliseconds; a waiting zygote that needs longer than this hangs.
_FORK_S = 20.0
# Time limit for a zygote of shells to accept a connection; it may be stopped.
_ACCEPT_S = 2.0
# Time between two requests to one that imports modules first.
_ASK_S = 0.05
# Zygotes of shells that wait at most, of a user.
_MAX_WAITING = 3
# Variables for which a zygote has values of its own.
_OVERRIDDEN = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Conditions = Mapping[str, Any]
OnWait = Callable[[], object]  # `int` does nothing
State = Literal["none", "importing", "ready"]


def conditions(
    environment: Mapping[str, str], sys_path: Iterable[str], learned: Sequence[str] | None = ()
) -> Conditions:
    """Return the properties that a zygote inherits from the notebook when it is made; a mesh starts
    from the zygote only if they have not changed since.

    Args:
        environment: environment variables of the notebook.
        sys_path: the notebook's search path of modules, in which torch is found.
        learned: modules of the project that it imports; None if it imports torch only.
    """
    entries = [entry for entry in sys_path if isinstance(entry, str)]
    path, here = absolute(entries), [os.path.abspath(entry) for entry in entries]
    torch = PathFinder.find_spec("torch", path)
    packages = {name.partition(".")[0] for name in learned or ()}
    found = {name: PathFinder.find_spec(name, here) for name in packages}
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    status = Path("/proc/self/status").read_text(errors="replace").splitlines()
    origin = None if torch is None else torch.origin
    return {
        "environment": {n: v for n, v in environment.items() if n not in SET_BY_TORCH},
        "torch": (origin, os.stat(origin).st_mtime_ns) if origin else None,
        "installed": {place: _installed(place) for place in path if _is_packages(place)},
        "learned": learned,
        "found": {name: spec and spec.origin for name, spec in found.items()},
        "limits": [resource.getrlimit(limit) for limit in limits],
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "umask": [line for line in status if line.startswith("Umask")],
    }


def _is_packages(place: str) -> bool:
    return place.endswith(("site-packages", "dist-packages")) and os.path.isdir(place)


def _installed(place: str) -> dict[str, int]:
    """Return the names in a directory of packages, and when each package was installed, in ns.

    Not the directory's own time, as Python adds ``__pycache__`` to it when it imports a module.
    """
    with os.scandir(place) as entries:
        return {
            entry.name: entry.stat().st_mtime_ns if entry.name.endswith(".dist-info") else 0
            for entry in entries
            if entry.name != "__pycache__"
        }


class Prestart:
    """The waiting zygote of this process: a background process with torch imported, from which the
    next mesh is forked.

    Args:
        keep_s: how long it waits while none of its meshes lives, in seconds.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s, self._owner_pid = keep_s, os.getpid()
        self._lock = threading.Lock()
        self._state: State = "none"
        self._made_in: Conditions = {}
        self._list_path = os.devnull
        self._learned: Sequence[str] = ()  # what the zygote is to import of the project's modules
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._needs: waiting.Needs | None = None  # which the zygote itself compares, of shells

    def begin(self, is_preloaded: bool = True) -> None:
        """Start a zygote, which imports torch in the background; a failure of it is reported by the
        next start of a mesh.

        Args:
            is_preloaded: whether it imports more than torch.
        """
        with self._lock, contextlib.suppress(Exception):
            self._make(is_preloaded)

    def prepare(self, timeout_s: float, on_wait: OnWait = int, is_preloaded: bool = True) -> bool:
        """Wait until the waiting zygote, or a new one, has imported torch, so that a mesh can be
        forked from it.

        Args:
            timeout_s: time limit in seconds.
            on_wait: called before a wait for a zygote that has not imported torch yet.
            is_preloaded: whether it imports more than torch.

        Returns:
            Whether a zygote is ready.

        Raises:
            HostError: the zygote has not imported torch in time.
        """
        if os.getpid() != self._owner_pid:  # a child that user code forked
            return False
        with self._lock, contextlib.suppress(OSError):
            now = self._conditions(is_preloaded)
            self._look(0)
            if self._made_in != now or self._state == "none":
                self._make(is_preloaded)
            if self._state == "importing":
                on_wait()
                self._look(timeout_s)
            if self._state == "importing":
                raise HostError(
                    f"torch was not imported after {timeout_s} s. The next `%dist_start` waits "
                    "for it, too"
                )
        return self._state == "ready"

    def start(self, ticket: Ticket, log: int) -> tuple[int, int]:
        """Fork a mesh's guardian, agent and zygote from the waiting zygote.

        Args:
            ticket: ticket of the mesh.
            log: file descriptor for the error output of guardian and agent.

        Returns:
            The process ids of the guardian and the agent.

        Raises:
            HostError: the waiting zygote has ended, or hangs.
        """
        policy = os.sched_getscheduler(0)
        order = StartMesh(str(ticket.path), os.getcwdb(), dict(os.environb), self._needs, policy)
        text = SecretBytes(msgspec.msgpack.encode(order))  # the environment may have secrets
        read_end, write_end = os.pipe()
        with self._lock, open(read_end, "rb") as pipe:
            with open(write_end, "wb"), open(os.memfd_create("cellmesh-start"), "wb", 0) as request:
                request.write(text)
                with contextlib.suppress(OSError):  # it has ended
                    if self._socket is not None:
                        numbers = [request.fileno(), write_end, log]
                        socket.send_fds(self._socket, [b"m"], numbers)
            try:
                is_answered = wait_readable([read_end], _FORK_S)
            except BaseException:  # Ctrl-C
                if wait_readable([read_end], _FORK_S):
                    # Its guardian ends the rest of the mesh.
                    for agent in pipe.readline().split()[1:]:
                        os.kill(int(agent), signal.SIGKILL)
                raise
            line = f"the waiting zygote has forked nothing in {_FORK_S} s"
            if is_answered:
                line = pipe.readline().decode(errors="replace")
            if not re.fullmatch(r"\d+ \d+\n", line):
                self._end()
                raise HostError(line or "the waiting zygote has ended")
        pids = line.split()
        return int(pids[0]), int(pids[1])

    def end(self) -> None:
        """End the waiting zygote; meshes that were forked from it run on."""
        if os.getpid() == self._owner_pid:
            with self._lock:
                self._end()

    def _conditions(self, is_preloaded: bool) -> Conditions:
        return conditions(os.environ, sys.path, self._learned if is_preloaded else None)

    def _make(self, is_preloaded: bool) -> None:
        self._end()
        self._read_list(is_preloaded)
        now = self._conditions(is_preloaded)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._child = self._spawn([theirs.fileno()], sys.path, self._owner_pid)
        self._socket, self._state, self._made_in = ours, "importing", now

    def _look(self, timeout_s: float) -> None:
        """Read the zygote's messages; while it imports torch, wait up to `timeout_s` for one."""
        if self._socket is None or self._state not in ("importing", "ready"):
            return
        wait_s = timeout_s if self._state == "importing" else 0
        if wait_readable([self._socket.fileno()], wait_s):
            try:
                data = self._socket.recv(len(waiting.READY))
            except OSError:
                data = b""
            if data == waiting.READY:
                self._state = "ready"
                self._look(0)
            else:
                self._state = "none"  # if it cannot import torch, a cold start shows the error

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._child is not None and self._child.poll() is None:
            self._child.kill()  # it may import for some time yet
        self._socket, self._child, self._state = None, None, "none"

    def _read_list(self, is_preloaded: bool) -> None:
        self._list_path, self._learned = os.devnull, ()
        if is_preloaded:
            self._list_path = str(own_list())
            self._learned = learned_modules(Path(self._list_path))

    def _spawn(
        self, descriptors: Sequence[int], sys_path: Iterable[str], kernel_pid: int, **more: Any
    ) -> subprocess.Popen[bytes]:
        """Start a zygote (`workers.prestart.main`), whose plan is its standard input."""
        plan = {
            "server": descriptors[0],
            "kernel_pid": kernel_pid,
            "keep_s": self._keep_s,
            "sys_path": [path for path in sys_path if isinstance(path, str)],
            "learned": self._learned,
            "list_path": self._list_path,
            **more,
        }
        with os.fdopen(os.memfd_create("cellmesh-plan"), "w+") as file:
            json.dump(plan, file)
            file.flush()
            mark = marks.free_value()  # each mesh's zygote writes its own in its place
            mesh_less = argument(runtime_root(), kernel_pid)
            child = subprocess.Popen(
                isolated_command("cellmesh.workers.prestart", mesh_less, "/proc/self/fd/0"),
                env={**os.environ, **dict.fromkeys(_OVERRIDDEN, "1"), marks.VARIABLE: mark},
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,
            )
        threading.Thread(target=child.wait, name="cellmesh-reaper", daemon=True).start()
        return child


class MeshZygote(Prestart):
    """The zygote of a mesh that this process has started, in place of a waiting one: a script's
    next mesh is forked from it.

    Args:
        ticket: ticket of the mesh.
    """

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(0)
        self._directory, self._learned = Path(ticket.directory), ticket.learned
        self._made_in = self._conditions(bool(ticket.learned_list))

    def prepare(self, timeout_s: float, on_wait: OnWait = int, is_preloaded: bool = True) -> bool:
        """Connect to the zygote, if a mesh would inherit the same from it as from a new one."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            now, limit_s = self._conditions(is_preloaded), min(timeout_s, _ACCEPT_S)
            if os.getpid() != self._owner_pid or now != self._made_in:
                return False
            stack.callback(os.close, directory := open_own_directory(self._directory, False))
            self._socket = waiting.connect(directory, waiting.OF_MESH, limit_s)
            if self._socket is None:
                self._made_in = {}  # it hangs: do not wait again
        return self._socket is not None

    def start(self, ticket: Ticket, log: int) -> tuple[int, int]:
        """Fork a mesh's guardian, agent and zygote from the mesh's zygote; see `Prestart.start`."""
        try:
            return super().start(ticket, log)
        finally:
            self._end()


class ShellPrestart(Prestart):
    """The zygotes that wait for the meshes of this user's shells, of which the next mesh is forked
    from one that fits.

    Each is left by a process whose mesh found none, and lives on when that process ends.
    """

    def __init__(self) -> None:
        super().__init__(KEEP_S)
        # Without the first entry: the folder of this process's program, or that of its script.
        self._path = sys.path if sys.flags.safe_path else sys.path[1:]
        self._asked: set[Process] = set()
        self._again: tuple[float, OnWait, bool] = (0.0, int, True)
        self._leaves = False
        self._files = (0, 0)

    def prepare(self, timeout_s: float, on_wait: OnWait = int, is_preloaded: bool = True) -> bool:
        """Connect to the next waiting zygote, if there is one; whether it fits is its answer to
        `start`. Does not wait for one that imports torch: its ranks would each import the learned
        modules, which a start without a zygote imports once.
        """
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            self._read_list(is_preloaded)
            now, own = (conditions({}, path, self._learned) for path in (sys.path, self._path))
            self._needs = _needs(now, self._list_path)
            # Else modules beside the script take the place of installed ones.
            self._leaves = own == now
            self._files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a start raises it
            stack.callback(os.close, directory := waiting.open_directory(makes=False))
            for each in waiting.find_sockets(directory):
                if each.process in self._asked or each.num_modules < 0:
                    continue
                self._asked.add(each.process)
                self._again = timeout_s, on_wait, is_preloaded
                self._last = each.process
                limit_s = min(timeout_s, _ACCEPT_S)
                if (found := waiting.connect(directory, each.name, limit_s)) is not None:
                    self._socket, self._state = found, "ready"
                    return True
        return False

    def start(self, ticket: Ticket, log: int) -> tuple[int, int]:
        """Fork a mesh's guardian, agent and zygote from the waiting zygote, if that fits. Waits
        until it has imported all modules, which a start without it would import as well.

        Raises:
            HostError: the zygote does not fit, has ended, or hangs.
        """
        timeout_s, on_wait, _ = self._again
        ends, pids = time.monotonic() + timeout_s, None
        try:
            while pids is None:
                try:
                    pids = super().start(ticket, log)
                except HostError as error:
                    if str(error) != waiting.IMPORTING or time.monotonic() > ends:
                        raise
                    on_wait()
                    time.sleep(_ASK_S)
                    self._asked.discard(self._last)
                    if not self.prepare(*self._again):
                        raise
        finally:
            self._end()
        self._leaves = False
        return pids

    def leave_one(self) -> None:
        """Start a zygote in the background, for later meshes, if this process's mesh was started
        and found none that fits. The one that was used least recently makes room for it.
        """
        needs = self._needs
        if needs is None or not self._leaves:
            return
        self._leaves = False
        with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
            stack.callback(os.close, directory := waiting.open_directory())
            found = waiting.find_sockets(directory)
            if not self._asked.issuperset(each.process for each in found):
                return  # another process has just left one
            by_use = sorted(found, key=lambda each: each.used_at)
            for each in by_use[: max(0, len(found) + 1 - _MAX_WAITING)]:
                os.kill(each.process.pid, signal.SIGKILL)
            # At once, so that no other process leaves one, too; with the zygote's name below.
            name = waiting.name_socket(os.getpid())
            server = stack.enter_context(waiting.listen(directory, name))
            of_shells = {"directory": directory, "conditions": needs.conditions}
            numbers = [server.fileno(), directory]
            child = self._spawn(numbers, self._path, 0, **of_shells, owner=os.getpid())
            own_name = waiting.name_socket(child.pid)
            os.rename(name, own_name, src_dir_fd=directory, dst_dir_fd=directory)
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, self._files)


def _needs(now: Conditions, list_path: str) -> waiting.Needs:
    """Return the conditions of a shell's mesh, with all that a process inherits."""
    status = Path("/proc/self/status").read_text(errors="replace").splitlines()
    kept = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:", "SigBlk")
    spaces = sorted(os.listdir("/proc/self/ns"))
    jobs = re.compile(r"[^/\n]*(?:slurm|job|step|pbs|lsf|condor|run-)[^/\n]*")
    properties = {
        **now,
        "learned": list_path != os.devnull,
        "found": (),  # the zygote looks, for those that it has imported
        "status": [line for line in status if line.startswith(kept)],
        "namespaces": [os.readlink(f"/proc/self/ns/{space}") for space in spaces],
        "job": jobs.findall(Path("/proc/self/cgroup").read_text()),
        "policy": os.sched_getscheduler(0),
        "python": (sys.executable, sys.prefix, sys.version),
        "cellmesh": (own_version(), __file__),
    }
    as_text = {name: repr(value) for name, value in properties.items()}
    all_signals = sorted(signal.valid_signals())
    ignored = [number for number in all_signals if signal.getsignal(number) is signal.SIG_IGN]
    path = tuple(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return waiting.Needs(as_text, path, list_path, tuple(ignored))


def shell_prestart() -> ShellPrestart | None:
    """Return the waiting zygotes of this user's shells; None if the project's options forbid one,
    or this process belongs to a rank.
    """
    return ShellPrestart() if _options_if_allowed() is not None else None


def begin_prestart(shell: Any, keep_s: float) -> None:
    """Start a zygote for meshes of this process, unless it has one or the project's options forbid
    it.

    Args:
        shell: the notebook's shell, which keeps the zygote.
        keep_s: how long it waits while none of its meshes lives, in seconds; 0 for no zygote.
    """
    if getattr(shell, "cellmesh_prestart", None) is not None or keep_s <= 0:
        return
    if (options := _options_if_allowed()) is not None:
        shell.cellmesh_prestart = Prestart(keep_s)
        shell.cellmesh_prestart.begin("preload" not in options or bool(options["preload"]))


def _options_if_allowed() -> Mapping[str, Any] | None:
    """Return the project's options if they and this process allow a waiting zygote."""
    try:
        options = read_project_options(Path.cwd())
    except (MeshUsageError, OSError):  # a start reports the error
        return None
    # A marked process belongs to a rank, and its children must keep the mark.
    is_allowed = options.get("prestart", True) is True and marks.VARIABLE not in os.environ
    return options if is_allowed else None


def end_prestart(shell: Any) -> None:
    """End the waiting zygote of a notebook (`begin_prestart`)."""
    prestart, shell.cellmesh_prestart = getattr(shell, "cellmesh_prestart", None), None
    if prestart is not None:
        prestart.end()


def own_prestart() -> Prestart | None:
    """Return this notebook's waiting zygote; None if ``%load_ext cellmesh`` has started none."""
    prestart: Prestart | None = getattr(own_shell(), "cellmesh_prestart", None)
    return prestart
