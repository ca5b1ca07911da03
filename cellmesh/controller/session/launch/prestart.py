"""A zygote (a process that has imported torch and waits to be forked) in the background of a
notebook, so that a mesh starts without an import of torch.

`%load_ext cellmesh` starts it; a mesh that is started in the same process is forked from it
(`workers.prestart`), and it is kept for the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

import msgspec

from ....errors import HostError, MeshUsageError
from ....wire import marks
from ....wire.environment import SET_BY_TORCH
from ....wire.marks import READY, StartMesh, argument
from ....wire.own_file import SecretBytes
from ....wire.process import absolute, isolated_command, wait_readable
from ....wire.ticket import Ticket, runtime_root
from ...kernel import own_shell
from ...options import read_project_options
from ...preload import learned_modules, own_list

# How long a zygote waits while none of its meshes lives.
KEEP_S = 600.0
# Forks take milliseconds; a waiting zygote that needs longer than this hangs.
_FORK_S = 20.0
# Variables for which a zygote has values of its own.
_OVERRIDDEN = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Conditions = Mapping[str, Any]
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
        "cores": os.sched_getaffinity(0),
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
        self._keep_ms = int(keep_s * 1000)
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._state: State = "none"
        self._made_in: Conditions = {}
        self._learned: Sequence[str] = ()  # what the zygote is to import of the project's modules
        self._socket: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def begin(self, is_preloaded: bool = True) -> None:
        """Start a zygote, which imports torch in the background; a failure of it is reported by the
        next start of a mesh.

        Args:
            is_preloaded: whether it imports more than torch.
        """
        with self._lock, contextlib.suppress(Exception):
            self._make(is_preloaded)

    def prepare(
        self,
        timeout_s: float,
        on_wait: Callable[[], object] = lambda: None,
        is_preloaded: bool = True,
    ) -> bool:
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
            now = conditions(os.environ, sys.path, self._learned if is_preloaded else None)
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
        read_end, write_end = os.pipe()
        request = os.memfd_create("cellmesh-start")
        with self._lock, open(read_end, "rb") as pipe:
            try:
                order = SecretBytes(  # the environment may have secrets
                    msgspec.msgpack.encode(
                        StartMesh(str(ticket.path), os.getcwdb(), dict(os.environb))
                    )
                )
                with open(request, "wb", closefd=False) as file:
                    file.write(order)
                if self._socket is not None:
                    socket.send_fds(self._socket, [b"m"], [request, write_end, log])
            except OSError:  # it has ended
                self._state = "none"
            finally:
                os.close(request)
                os.close(write_end)
            try:
                is_answered = wait_readable([read_end], _FORK_S)
            except BaseException:  # Ctrl-C
                if wait_readable([read_end], _FORK_S):
                    for agent in pipe.readline().split()[
                        1:
                    ]:  # its guardian ends the rest of the mesh
                        os.kill(int(agent), signal.SIGKILL)
                raise
            if not is_answered:
                self._end()
                raise HostError(f"the waiting zygote has forked nothing in {_FORK_S} s")
            pids = pipe.readline().split()
            if len(pids) != 2:
                self._end()
                raise HostError("the waiting zygote has ended")
        return int(pids[0]), int(pids[1])

    def end(self) -> None:
        """End the waiting zygote; meshes that were forked from it run on."""
        if os.getpid() == self._owner_pid:
            with self._lock:
                self._end()

    def _make(self, is_preloaded: bool) -> None:
        self._end()
        learned_list = own_list()
        self._learned = learned_modules(learned_list)
        now = conditions(os.environ, sys.path, self._learned if is_preloaded else None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_path = os.memfd_create("cellmesh-sys-path")
        try:
            with open(own_path, "w", closefd=False) as file:
                plan = {
                    "sys_path": [path for path in sys.path if isinstance(path, str)],
                    "is_preloaded": is_preloaded,
                    "learned": self._learned,
                    "list_path": str(learned_list),
                }
                json.dump(plan, file)
            mark = marks.free_value()  # each mesh's zygote writes its own in its place
            self._child = subprocess.Popen(
                isolated_command(
                    "cellmesh.workers.prestart",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(self._keep_ms),
                    argument(runtime_root(), os.getpid()),
                    "/proc/self/fd/0",
                ),
                env={**os.environ, **dict.fromkeys(_OVERRIDDEN, "1"), marks.VARIABLE: mark},
                stdin=own_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            os.close(own_path)
            theirs.close()
        self._socket, self._state, self._made_in = ours, "importing", now
        threading.Thread(target=self._child.wait, name="cellmesh-reaper", daemon=True).start()

    def _look(self, timeout_s: float) -> None:
        """Read the zygote's messages; while it imports torch, wait up to `timeout_s` for one."""
        if self._socket is None or self._state not in ("importing", "ready"):
            return
        wait_s = timeout_s if self._state == "importing" else 0
        if wait_readable([self._socket.fileno()], wait_s):
            try:
                data = self._socket.recv(len(READY))
            except OSError:
                data = b""
            if data == READY:
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


def begin_prestart(shell: Any, keep_s: float) -> None:
    """Start a zygote for meshes of this process, unless it has one or the project's options forbid
    it.

    Args:
        shell: the notebook's shell, which keeps the zygote.
        keep_s: how long it waits while none of its meshes lives, in seconds; 0 for no zygote.
    """
    if getattr(shell, "cellmesh_prestart", None) is not None:
        return
    try:
        options = read_project_options(Path.cwd())
    except (MeshUsageError, OSError):  # %dist_start reports the error
        return
    # A marked process belongs to a rank, and its children must keep the mark.
    if options.get("prestart", True) is True and keep_s > 0 and marks.VARIABLE not in os.environ:
        shell.cellmesh_prestart = Prestart(keep_s)
        shell.cellmesh_prestart.begin("preload" not in options or bool(options["preload"]))


def end_prestart(shell: Any) -> None:
    """End the waiting zygote of a notebook (`begin_prestart`)."""
    prestart, shell.cellmesh_prestart = getattr(shell, "cellmesh_prestart", None), None
    if prestart is not None:
        prestart.end()


def own_prestart() -> Prestart | None:
    """Return this notebook's waiting zygote; None if ``%load_ext cellmesh`` has started none."""
    prestart: Prestart | None = getattr(own_shell(), "cellmesh_prestart", None)
    return prestart
