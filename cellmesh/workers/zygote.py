"""The zygote: one interpreter with torch imported, from which ranks are forked.

It has one thread, never touches CUDA, and talks to its agent over a socketpair: neither threads nor
a ZeroMQ context may cross a fork. It forks twice, so that a rank is an orphan that its agent, a
subreaper, takes in; the agent then has the exit status, and the zygote's own end costs no rank.

When agent and guardian go without a word (kill -9), the zygote is what is left to tidy up: it ends
what the ranks started and removes the mesh's directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import HostError
from ..wire import marks
from ..wire.descriptors import wait_readable
from ..wire.environment import VISIBLE, Surroundings
from ..wire.host import same_release
from ..wire.ticket import Ticket, read_ticket
from .linux_process import (
    PROGRAM,
    die_with,
    name_process,
    receive_descriptors,
    run_and_exit,
)

if TYPE_CHECKING:
    from .rank.main import RankOptions
    from .rank.shell import RankShell

_MAX_MESSAGE_BYTES = 1 << 20
# What a rank gets: the pipes for its descriptors 1 and 2, its work, its control and its segment
# socket.
DESCRIPTORS_A_RANK = 5
# Its environment: OpenBLAS starts its threads when numpy is imported, unless told not to.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# SCM_RIGHTS carries at most 253 descriptors.
MAX_RANKS_A_MESSAGE = 50


# From the end of a process's connections to that of the process.
_AGENT_END_S = 5.0


class ForkRanks(msgspec.Struct, frozen=True, tag=True):
    """Ask the zygote to fork ranks (msgpack of RankOptions each), with DESCRIPTORS_A_RANK
    descriptors for each.
    """

    options: list[msgspec.Raw]


class ForkStore(msgspec.Struct, frozen=True, tag=True):
    """Ask the zygote to fork the c10d store's process, given the store's listening socket."""

    address: str
    port: int
    agent_pid: int


class ChangeSurroundings(msgspec.Struct, frozen=True, tag=True):
    """Have ranks that are forked from now on another environment or working directory."""

    changes: Surroundings


class ImportFrom(msgspec.Struct, frozen=True, tag=True):
    """Have ranks import from this `sys.path`: the first message."""

    path: list[str]


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """The zygote says that it has imported torch and can fork ranks."""

    num_gpus: int
    num_threads: int


class ZygoteFailed(msgspec.Struct, frozen=True, tag=True):
    """The zygote says that an import failed; the zygote ends."""

    text: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The zygote's answer: the forked processes, in order; `problem` says why some are missing."""

    pids: list[int]
    problem: str = ""


Request = ForkRanks | ForkStore | ChangeSurroundings
Reply = ZygoteReady | ZygoteFailed | Forked


def main(descriptor: str, ticket_path: str) -> None:
    """Serve an agent as its zygote, in a process that `wire.interpreter` has started."""
    serve_agent(int(descriptor), ticket_path)


def serve_agent(descriptor: int, ticket_path: str, shell: RankShell | None = None) -> None:
    """Serve an agent as its zygote until the agent ends; without a shell, first import torch."""
    ticket = read_ticket(Path(ticket_path))
    agent = socket.socket(fileno=descriptor)
    agent.set_inheritable(False)
    name_process("cellmesh-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[:], sys.orig_argv[:] = [PROGRAM], [sys.executable, PROGRAM]
    os.chdir(ticket.cwd)
    try:
        shell = shell or import_all()
        path = _hear_path(agent)
        if path is None:  # the agent has ended
            _tidy_up(ticket)
            return
        _make_like_notebook(ticket, path)
        num_gpus = _count_gpus(ticket)
    except HostError as error:
        _tell(agent, ZygoteFailed(str(error)))
        raise
    except BaseException as error:
        _tell(agent, ZygoteFailed(f"{type(error).__name__}: {error}"))
        raise
    num_threads = len(os.listdir("/proc/self/task"))
    _tell(agent, ZygoteReady(num_gpus, num_threads))
    _serve(agent, shell)
    _tidy_up(ticket)


def _tell(agent: socket.socket, reply: Reply) -> None:
    with contextlib.suppress(OSError):  # it has gone: what it said before is read, then its end
        agent.send(msgspec.msgpack.encode(reply))


def import_all() -> RankShell:
    """Import what ranks need, once, and freeze it: frozen objects keep forked pages shared."""
    gc.disable()
    # What every rank would import by itself: numpy.random alone is 6 MB and 20 ms a rank.
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
    default_group.install()  # before a module that is preloaded imports the name
    shell = make_shell()
    gc.collect()
    gc.freeze()
    return shell


def _hear_path(agent: socket.socket) -> Sequence[str] | None:
    """Wait until the modules are there that ranks import; None if the agent ends before."""
    data = agent.recv(_MAX_MESSAGE_BYTES)
    return msgspec.msgpack.decode(data, type=ImportFrom).path if data else None


def _make_like_notebook(ticket: Ticket, path: Sequence[str]) -> None:
    """Check torch's version, take the notebook's `sys.path`, and import the `--preload` modules."""
    torch = sys.modules["torch"]
    if ticket.torch and not same_release(torch.__version__, ticket.torch):
        raise ImportError(
            f"the ranks import torch {torch.__version__} ({torch.__file__}), and the notebook has "
            f"{ticket.torch}: restart the kernel if torch was installed since it began"
        )
    # The user's modules are found as in the notebook, beside it for one.
    sys.path[:] = path
    for name in ticket.preload:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"--preload {name}: {error}") from error
    if ticket.preload:
        gc.collect()
    gc.freeze()


def _count_gpus(ticket: Ticket) -> int:
    """Count GPUs by NVML, as asking CUDA would initialise it and spoil every fork.

    Raises:
        HostError: GPUs were asked for that this host has not.
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


def _serve(agent: socket.socket, shell: RankShell) -> None:
    """Fork processes for the agent, on its demand, until the agent's socket closes."""
    decoder = msgspec.msgpack.Decoder(Request)
    while True:
        try:
            data, descriptors = receive_descriptors(
                agent, _MAX_MESSAGE_BYTES, DESCRIPTORS_A_RANK * MAX_RANKS_A_MESSAGE
            )
        except ConnectionResetError:
            # It went without hearing us; told once, before what it said last.
            continue
        if not data:
            return
        try:
            match request := decoder.decode(data):
                case ForkRanks(options):
                    own = [
                        descriptors[i : i + DESCRIPTORS_A_RANK]
                        for i in range(0, len(descriptors), DESCRIPTORS_A_RANK)
                    ]
                    pairs = zip(options, own, strict=True)
                    starts = [functools.partial(_start_rank, *pair, shell) for pair in pairs]
                case ChangeSurroundings(changes):
                    _change_surroundings(changes)
                    continue
                case ForkStore():
                    starts = [functools.partial(_start_store, request, descriptors[0])]
            forked = _fork_orphans(starts, agent)
        except Exception as error:  # no process or memory left: the next request may find some
            traceback.print_exc(file=sys.__stderr__)
            forked = Forked([], f"{type(error).__name__}: {error}")
        for number in descriptors:
            os.close(number)
        _tell(agent, forked)


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


def _fork_orphans(starts: Sequence[Callable[[], None]], agent: socket.socket) -> Forked:
    """Run each function in a process forked twice, so that no process waits for it here, and
    without the connection to the agent.
    """
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        pids: list[int] = []
        problem = ""
        try:  # it may not return: there would be a second zygote
            for start in starts:
                pid = os.fork()
                if pid == 0:
                    os.close(read_end)
                    os.close(write_end)
                    run_and_exit(functools.partial(_run_in_child, start, agent))
                pids.append(pid)
        except OSError as error:
            problem = str(error)
        finally:
            os.write(write_end, msgspec.msgpack.encode(Forked(pids, problem)))
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()  # to its end, which comes when the middle process has gone
    os.waitpid(middle, 0)
    return msgspec.msgpack.decode(data, type=Forked)


def _run_in_child(start: Callable[[], None], agent: socket.socket) -> None:
    agent.close()
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
    """Give descriptors the numbers from 0 on, of which programs inherit the first three; close all
    others.
    """
    num_own = len(descriptors)
    # First out of the way of each other, wherever the limit of open files is.
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, num_own) for number in descriptors]
    for number, own in enumerate(moved):
        os.dup2(own, number, inheritable=number < 3)
    os.closerange(num_own, max(moved) + 1)
    os.closerange(num_own, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _start_store(order: ForkStore, listener: int) -> None:
    from torch._C._distributed_c10d import TCPStore

    die_with(order.agent_pid)
    name_process("cellmesh-store")
    # With a listening socket of ours it is bound to one interface; by itself it binds all.
    store = TCPStore(
        order.address,
        order.port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener),
    )
    while store is not None:
        signal.pause()


def _tidy_up(ticket: Ticket) -> None:
    """Wait for the agent's death, then end processes that carry the mesh's mark, and remove its
    directory. Its guardian does that as well, unless it was killed, too.
    """
    # Somebody else was faster, or it has signed nothing yet.
    with contextlib.suppress(HostError, OSError):
        ticket = read_ticket(ticket.path)  # the agent has signed it since
        wait_readable([os.pidfd_open(ticket.agent_pid)], _AGENT_END_S)
    marks.end_mesh_if_dead(ticket)
