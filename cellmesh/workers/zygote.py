"""The zygote: a process that has imported torch, and from which ranks are forked so that they start
quickly.

It has one thread, never uses CUDA, and communicates with its agent over a socketpair, as neither
threads nor a ZeroMQ context may cross a fork. It forks twice, so that a rank is an orphan that its
agent, a subreaper, adopts; the agent then receives the exit status, and the zygote's own end does
not affect the rank.

If agent and guardian are both killed (SIGKILL), the zygote cleans up: it ends the processes that
ranks have started, and removes the mesh's directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import itertools
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import HostError
from ..wire import marks, waiting
from ..wire.environment import VISIBLE, Surroundings
from ..wire.host import same_release
from ..wire.own_file import open_own_directory
from ..wire.preload import quick_to_import, read_preloads
from ..wire.process import wait_readable
from ..wire.ticket import Ticket, read_ticket
from .linux_process import (
    PROGRAM,
    die_with,
    live_on,
    name_process,
    receive_descriptors,
    run_and_exit,
)
from .preload import Loading, Preloaded, list_stages

if TYPE_CHECKING:
    from .rank.main import RankOptions
    from .rank.shell import RankShell

_MAX_MESSAGE_BYTES = 1 << 20
# Descriptors of a rank: the pipes for its descriptors 1 and 2, and its work, control and segment
# sockets.
DESCRIPTORS_A_RANK = 5
# The zygote's environment: by default, OpenBLAS starts threads when numpy is imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# SCM_RIGHTS carries at most 253 descriptors, of which one is the store's.
MAX_RANKS_A_MESSAGE = 50


# From the end of the agent's connection to the end of its process.
_AGENT_END_S = 5.0
# Time limit of the import of a learned module while the start of a mesh waits for it.
_HANGS_S = 10.0
# Modules that need no torch, of the ranks' shell and of those that torch imports: they are imported
# while torch's libraries are loaded, after the extension modules among what they import, as libc
# loads one library after another.
_EXTENSIONS = (
    # Not `_asyncio`: if it is imported first, `asyncio` never knows which task executes.
    *("asyncio", "_csv", "_ssl", "bz2", "cmath", "datetime", "decimal", "lzma", "pickle", "queue"),
    *("random", "termios", "unicodedata"),
)
_BESIDE = (
    *("IPython.core.interactiveshell", "IPython.core.completer", "stack_data"),
    *("pygments.lexers.python", "unittest.mock", "importlib.metadata", "torchgen.model", "tqdm"),
    "cellmesh.wire.codec",
)
# Packages that torch requires, and imports when they are needed.
_REQUIRED = frozenset({"sympy"})
# From the last request until the zygote imports more, which ranks of a restart or heal then have:
# short scripts do not pay for it.
_IDLE_S = 15.0
# Connections that are kept while no request arrives on them.
_MAX_ASKING = 8


@dataclass(frozen=True)
class Imported:
    """What a process has imported for the ranks that are forked from it: their shell, and modules
    besides torch.
    """

    shell: RankShell
    has: Preloaded


class StoreOptions(msgspec.Struct, frozen=True):
    """The options that the c10d store's process is forked with."""

    address: str
    port: int
    agent_pid: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """The agent's request to the zygote to fork the c10d store's process, if there are options for
    it, and ranks: the msgpack of each rank's RankOptions. The store's listening socket and
    DESCRIPTORS_A_RANK descriptors for each rank are sent with it.
    """

    store: StoreOptions | None = None
    ranks: list[msgspec.Raw] = []


class ChangeSurroundings(msgspec.Struct, frozen=True, tag=True):
    """The agent's request to the zygote to fork later ranks with another environment or working
    directory.
    """

    changes: Surroundings


class ImportFrom(msgspec.Struct, frozen=True, tag=True):
    """The agent's first message to the zygote: the `sys.path` of the ranks."""

    path: list[str]


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """Reports that the zygote has imported torch and can fork ranks; `preloaded`: a sentence for
    users on the other modules that it has imported.
    """

    num_gpus: int
    num_threads: int
    preloaded: str = ""


class ZygoteFailed(msgspec.Struct, frozen=True, tag=True):
    """Reports that an import has failed and the zygote ends."""

    text: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The zygote's answer to a request to fork: the pids in the order of the request, 0 for a
    process that could not be forked; `problem`: why not; `preloaded`: see `ZygoteReady`.
    """

    pids: list[int]
    problem: str = ""
    preloaded: str = ""


Request = Fork | ChangeSurroundings
Reply = ZygoteReady | ZygoteFailed | Forked


def main(descriptor: str, ticket_path: str) -> None:
    """Serve an agent as its zygote, in a process of its own that the agent has started."""
    serve_agent(int(descriptor), ticket_path)


def serve_agent(descriptor: int, ticket_path: str, imported: Imported | None = None) -> None:
    """Serve an agent as its zygote until the agent ends; import torch first, unless the process
    that forked this one has done so.
    """
    ticket = read_ticket(Path(ticket_path))
    agent = socket.socket(fileno=descriptor)
    agent.set_inheritable(False)
    name_process("cellmesh-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[:], sys.orig_argv[:] = [PROGRAM], [sys.executable, PROGRAM]
    os.chdir(ticket.cwd)
    try:
        shell = imported.shell if imported is not None else import_all(ticket.learned)
        path = _hear_path(agent)
        if path is None:  # the agent has ended
            _tidy_up(ticket)
            return
        has = _make_like_notebook(ticket, path, imported)
        num_gpus = _count_gpus(ticket)
    except BaseException as error:
        kind = "" if isinstance(error, HostError) else f"{type(error).__name__}: "
        _tell(agent, ZygoteFailed(f"{kind}{error}"))
        raise
    sockets = (agent, *_listen(ticket))
    num_threads = len(os.listdir("/proc/self/task"))
    _tell(agent, ZygoteReady(num_gpus, num_threads, has.describe()))
    stages = list_stages(ticket.learned) if ticket.learned_list else []
    _serve(sockets, shell, Loading(stages, ticket.learned_list, str(ticket.path), has=has))
    _tidy_up(ticket)


def _tell(agent: socket.socket, reply: Reply) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, which `_serve` detects
        agent.send(msgspec.msgpack.encode(reply))


def _load_libraries() -> None:
    """Load torch's libraries without the interpreter's lock, which an import holds for these 0.2 s.
    Nothing for builds with GPUs: torch loads some of their libraries in an order of its own.
    """
    torch = PathFinder.find_spec("torch")
    if torch is None or torch.origin is None or "TORCH_USE_RTLD_GLOBAL" in os.environ:
        return
    libraries = Path(torch.origin).parent / "lib"
    if any((libraries / f"libtorch_{device}.so").exists() for device in ("cuda", "hip", "xpu")):
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # As torch does. What cannot be loaded, it reports.
    if dlopen(bytes(libraries / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
        dlopen(bytes(libraries / "libtorch.so"), os.RTLD_NOW)


def _try_to_import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # the module that needs it reports the error
            importlib.import_module(name)


def import_all(learned: Iterable[str] = ()) -> RankShell:
    """Import the modules that ranks need, and exempt all objects from garbage collection
    (`gc.freeze`), so that forked ranks share their memory.

    Args:
        learned: names of modules that the project's ranks import.

    Raises:
        HostError: a file of the user's, as one beside a script, has the name of torch.
    """
    found = PathFinder.find_spec("torch")
    if found is not None and not found.submodule_search_locations:
        raise HostError(f"{found.origin} is in the place of torch, which ranks need: rename it")
    gc.disable()
    _try_to_import(_EXTENSIONS)
    loader = threading.Thread(target=_load_libraries, name="libraries")  # not "Thread-1"
    loader.start()
    _try_to_import((*_BESIDE, *_REQUIRED.intersection(learned)))
    loader.join()
    # Else every rank would import these itself: numpy.random alone takes 6 MB and 20 ms per rank.
    import torch.utils._device  # noqa: F401

    with contextlib.suppress(ImportError):
        import numpy.random  # noqa: F401  (numpy 2 imports it only when it is used)
    from IPython.utils import process  # noqa: F401  (`!command` imports it on first use)

    from .groups import check_torch

    check_torch()
    from ..wire.modules import loaded
    from .groups import default_group
    from .rank import imports, main  # noqa: F401
    from .rank.shell import make_shell

    imports.preimport()
    loaded.record()
    default_group.install()  # before preloaded modules import the replaced functions by name
    shell = make_shell()
    gc.freeze()  # without a collection, which costs 0.16 s and gives each rank 0.4 MB
    return shell


def _hear_path(agent: socket.socket) -> Sequence[str] | None:
    """Wait until the agent reports that the user's modules are in place; return the `sys.path` that
    it sends, or None if the agent ends.
    """
    data = agent.recv(_MAX_MESSAGE_BYTES)
    return msgspec.msgpack.decode(data, type=ImportFrom).path if data else None


def _make_like_notebook(ticket: Ticket, path: Sequence[str], given: Imported | None) -> Preloaded:
    """Check torch's version, take the notebook's `sys.path`, and import the `--preload` modules; if
    no waiting zygote has done so, also those that the project's ranks import.
    """
    torch = sys.modules["torch"]
    if ticket.torch and not same_release(torch.__version__, ticket.torch):
        raise ImportError(
            f"the ranks import torch {torch.__version__} ({torch.__file__}), and the notebook has "
            f"{ticket.torch}: restart the kernel if torch was installed since it began"
        )
    # Modules of the user are found as in the notebook, such as those beside it.
    sys.path[:] = path
    sys.modules[f"{__package__}.rank.main"].choose_displays()
    has = given.has if given is not None else Preloaded()
    if given is None and ticket.learned:
        quick = quick_to_import(read_preloads(Path(ticket.learned_list)), ticket.learned)
        loading = Loading([quick], ticket.learned_list, str(ticket.path), _HANGS_S)
        loading.finish()
        has = loading.has
    for name in ticket.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            raise ImportError(f"--preload {name}: {kind}{error}") from error
        if torch.cuda.is_initialized():
            raise ImportError(
                f"--preload {name} uses CUDA, and a process that has done so cannot be forked: "
                "import that on the ranks instead"
            )
    gc.freeze()
    return has


def _count_gpus(ticket: Ticket) -> int:
    """Count GPUs by NVML, as a query of CUDA would initialize it, which makes forks unusable.

    Raises:
        HostError: this host has fewer GPUs than the user has named.
    """
    import torch

    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    num_gpus = max(0, torch.cuda._device_count_nvml()) if is_built else 0
    if (asked := ticket.gpus) and num_gpus < len(asked):
        raise HostError(
            f"--gpus {','.join(asked)} ({VISIBLE}={ticket.env[VISIBLE]}) names {len(asked)} GPUs, "
            f"of which this host has {num_gpus}: name others, or leave it out"
        )
    return num_gpus


def _listen(ticket: Ticket) -> Sequence[socket.socket]:
    """Listen for the mesh's controller, whose next mesh may be forked from this process, too;
    return no socket for a mesh on many hosts.
    """
    if ticket.host is not None:
        return ()
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # the disk is full
        stack.callback(os.close, directory := open_own_directory(Path(ticket.directory), False))
        with contextlib.suppress(FileNotFoundError):  # that of a zygote which has ended
            os.unlink(waiting.OF_MESH, dir_fd=directory)
        return [waiting.listen(directory, waiting.OF_MESH)]
    return ()


def _serve(sockets: Sequence[socket.socket], shell: RankShell, loading: Loading) -> None:
    """Fork processes on the agent's requests, until the agent's socket closes, and other meshes on
    those of the mesh's controller; import more modules between them.

    Args:
        sockets: the connection to the agent, and those that listen for the controller.
        shell: the ranks' shell.
        loading: the modules to import.
    """
    agent, *servers = sockets
    decoder, pause_s = msgspec.msgpack.Decoder(Request), _IDLE_S
    asking: list[socket.socket] = []  # connections on which no request has arrived yet
    while True:
        numbers = [*(each.fileno() for each in (*sockets, *asking)), *loading.descriptors()]
        ready = wait_readable(numbers, min(loading.limits(pause_s), default=None))
        if called := [each for each in servers if each.fileno() in ready]:
            with contextlib.suppress(OSError):
                asking.append(waiting.greet(called[0]))
            if len(asking) > _MAX_ASKING:
                asking.pop(0).close()
            continue
        if asked := [each for each in asking if each.fileno() in ready]:
            asking.remove(asked[0])
            # The closed pipe shows it if there is no process or memory.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                _fork_mesh(asked[0], numbers, Imported(shell, loading.has))
            continue
        if agent.fileno() not in ready:
            outcome = loading.go_on()
            if isinstance(outcome, int):  # the copy has served until now
                os._exit(os.waitstatus_to_exitcode(outcome) & 0xFF)
            if outcome is not None:  # this is the copy
                pause_s = 0.0
            continue
        try:
            data, descriptors = receive_descriptors(
                agent, _MAX_MESSAGE_BYTES, 1 + DESCRIPTORS_A_RANK * MAX_RANKS_A_MESSAGE
            )
        except ConnectionResetError:
            # The agent ended without reading all replies; its last requests are still to be read.
            continue
        if not data:
            return
        try:
            request = decoder.decode(data)
            if isinstance(request, ChangeSurroundings):
                loading.drop_copy()  # it lacks the change
                _change_surroundings(request.changes)
                continue
            starts = _list_starts(request, descriptors, shell)
            forked = _fork_orphans(starts, (*sockets, *asking))
        except Exception as error:  # out of processes or memory, which may not last
            traceback.print_exc(file=sys.__stderr__)
            forked = Forked([], f"{type(error).__name__}: {error}")
        for number in descriptors:
            os.close(number)
        _tell(agent, msgspec.structs.replace(forked, preloaded=loading.has.describe()))


def _list_starts(
    request: Fork, descriptors: Sequence[int], shell: RankShell
) -> list[Callable[[], None]]:
    """Return the functions of the processes to fork: the store's first, as ranks wait for it."""
    own, starts = iter(descriptors), list[Callable[[], None]]()
    if request.store is not None:
        starts.append(functools.partial(_start_store, request.store, next(own)))
    for options in request.ranks:
        sockets = [*itertools.islice(own, DESCRIPTORS_A_RANK)]
        starts.append(functools.partial(_start_rank, options, sockets, shell))
    return starts


def _change_surroundings(changes: Surroundings) -> None:
    for name, value in changes.environment.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
    if changes.cwd:
        try:
            os.chdir(changes.cwd)
        except OSError as error:
            print(f"ranks keep their working directory: {error}", file=sys.__stderr__, flush=True)


def _fork_mesh(connection: socket.socket, own: Sequence[int], imported: Imported) -> None:
    """Fork the guardian of another mesh on a request, as an orphan, which the agent adopts."""
    with connection:
        _, descriptors = receive_descriptors(connection, 1, marks.NUM_DESCRIPTORS)
        try:
            if len(descriptors) < marks.NUM_DESCRIPTORS:
                return
            order = marks.read_order(descriptors)
            if (middle := os.fork()) == 0:
                try:  # must not return, or there would be a second zygote
                    if os.fork() == 0:
                        # Only here, as it imports the agent's modules.
                        prestart = importlib.import_module(f"{__package__}.prestart")
                        begin = prestart.become_guardian
                        run_and_exit(lambda: begin(order, descriptors, own, imported))
                finally:
                    os._exit(0)
            os.waitpid(middle, 0)
        finally:
            for number in descriptors:
                os.close(number)


def _fork_orphans(starts: Sequence[Callable[[], None]], sockets: Sequence[socket.socket]) -> Forked:
    """Run each function in a process of its own, without the zygote's sockets; each is forked
    twice, so that the zygote need not wait for its end.

    Several processes, on half of the cores, fork a part each: a fork copies page tables, which
    takes milliseconds.
    """
    num_parts = min(math.isqrt(len(starts)), max(1, len(os.sched_getaffinity(0)) // 2))
    size = -(-len(starts) // num_parts)
    parts = [starts[first : first + size] for first in range(0, len(starts), size)]
    pids: list[int] = []
    problem = ""
    for wait in [_begin_forks(part, sockets) for part in parts]:
        forked = wait()
        pids += forked.pids
        problem = problem or forked.problem
    return Forked(pids, problem)


def _begin_forks(
    starts: Sequence[Callable[[], None]], sockets: Sequence[socket.socket]
) -> Callable[[], Forked]:
    """Make a process that forks these; return a function that waits for its end."""
    read_end, write_end = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        problem = str(error)
        return lambda: Forked([0] * len(starts), problem)
    if middle == 0:
        try:  # must not return, or there would be a second zygote
            for start in starts:
                pid = os.fork()
                if pid == 0:
                    os.close(read_end)
                    os.close(write_end)
                    run_and_exit(functools.partial(_run_in_child, start, sockets))
                os.write(write_end, b"%d\n" % pid)
        except OSError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)

    def wait() -> Forked:
        os.waitpid(middle, 0)
        *pids, problem = os.read(read_end, 1 << 16).decode().split("\n")
        os.close(read_end)
        missing = [0] * (len(starts) - len(pids))
        if missing and not problem:
            problem = "the process that forks them was killed"
        return Forked([*map(int, pids), *missing], problem)

    return wait


def _run_in_child(start: Callable[[], None], sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    start()


def _start_rank(raw: msgspec.Raw, descriptors: Sequence[int], shell: RankShell) -> None:
    from .rank.main import RankOptions, run_rank

    options: RankOptions = msgspec.msgpack.decode(raw, type=RankOptions)
    null = os.open(os.devnull, os.O_RDONLY)
    place_descriptors([null, *descriptors])  # 0, 1, 2; then the three sockets
    run_rank(options, shell, *(socket.socket(fileno=number) for number in (3, 4, 5)))


def place_descriptors(descriptors: Sequence[int]) -> None:
    """Renumber descriptors from 0 on, and close all others; programs inherit only 0, 1 and 2."""
    num_own = len(descriptors)
    # First move them out of each other's way, whatever the limit of open files.
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, num_own) for number in descriptors]
    for number, own in enumerate(moved):
        os.dup2(own, number, inheritable=number < 3)
    os.closerange(num_own, max(moved) + 1)
    os.closerange(num_own, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _start_store(options: StoreOptions, listener: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    name_process("cellmesh-store")
    # The given listening socket is bound to one interface; the store's own would be bound to all.
    store = TCPStore(
        options.address,
        options.port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener),
    )
    die_with(options.agent_pid)  # only now, as it waits until all forks of its part are done
    while store is not None:
        signal.pause()


def _tidy_up(ticket: Ticket) -> None:
    """Wait for the agent's death, then end the mesh's remaining processes and remove its directory.
    The guardian does the same, unless it was killed, too.
    """
    live_on()  # this may be a copy, whose parent is ended below
    # Another process has removed the directory, or the agent has not completed the ticket yet.
    with contextlib.suppress(HostError, OSError):
        ticket = read_ticket(ticket.path)  # completed by the agent since
        wait_readable([os.pidfd_open(ticket.agent_pid)], _AGENT_END_S)
    marks.end_mesh_if_dead(ticket)
