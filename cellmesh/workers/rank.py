"""A rank: the main thread executes work, a control thread answers while it is busy.

Two sockets, both to the agent: ``work`` (the main thread reads it, the pump writes it, under its lock) and
``control`` (the control thread's own).
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import CellmeshError, ProtocolError
from ..wire import payload
from ..wire.framing import Parcel, at_rank_for_control, at_rank_for_work, encode
from ..wire.messages import (
    Display,
    DisplayKind,
    Done,
    Failed,
    Interrupt,
    Leave,
    Peek,
    Probe,
    RankReady,
    RankState,
    RankUnready,
)
from ..wire.stream import Channel
from .activity import look_at_main_thread
from .executor import Executor, reduce_for_notebook
from .groups import Groups, choose_placement
from .inspection import describe, is_quiet
from .interrupts import Interrupts
from .output import Log
from .processes import die_with, main_thread_sleeps, name_process, signal_own_group
from .shell import RankShell, Show
from .streams import Pump, RankStream, RunTracker

# How long an interrupted run may unwind before its collectives are cut.
_UNWIND_S = 0.4


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank is told when it is forked."""

    rank: int
    local_rank: int
    world_size: int
    num_local_ranks: int
    num_gpus: int
    num_threads: int
    backend: str
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    master_addr: str
    master_port: int
    incarnation: int
    agent_pid: int
    log_path: str
    mesh_name: str


def run_rank(options: RankOptions, shell: RankShell, work: socket.socket, control: socket.socket) -> None:
    """The life of a rank, from the fork to the end of its process; never returns.

    Args:
        options: who it is.
        shell: the shell that the zygote prepared.
        work: our end of the socketpair for work.
        control: our end of the socketpair for the control thread.
    """
    try:
        die_with(options.agent_pid)
    except ProcessLookupError:
        os._exit(1)
    name_process(f"cellmesh-r{options.rank}")
    _set_environment(options)
    faulthandler.enable(file=2)
    torch.set_num_threads(options.num_threads)
    _reseed()

    work_channel = Channel(work)
    tracker = RunTracker()
    interrupts = Interrupts()
    pump = Pump(lambda parcels: work_channel.send(encode(parcels)), Log(Path(options.log_path)), interrupts)
    sys.stdout = RankStream("stdout", pump, tracker)
    sys.stderr = RankStream("stderr", pump, tracker)
    shell.connect(_shower(pump, tracker))
    builtins.input = shell.raw_input  # type: ignore[assignment]
    tracker.follow_threads()
    interrupts.install()
    pump.start()

    placement = choose_placement(
        options.backend, options.local_rank, options.num_local_ranks, options.num_gpus
    )
    groups = Groups(options.rank, options.world_size, placement, options.master_port, options.incarnation)
    control_thread = _ControlThread(Channel(control), shell, groups, interrupts, placement.device)
    threading.Thread(target=control_thread.serve, name="cellmesh-control", daemon=True).start()
    try:
        groups.initialize()
        mesh = groups.build_mesh(options.mesh_dim_names, options.mesh_shape)
    except BaseException as error:
        pump.send(Parcel(RankUnready(f"{type(error).__name__}: {error}")))
        threading.Event().wait()  # the agent ends the process
    shell.user_ns.update(
        rank=options.rank,
        local_rank=options.local_rank,
        world_size=options.world_size,
        device=placement.device,
        mesh=mesh,
        torch=torch,
        dist=dist,
    )
    pump.send(Parcel(RankReady(str(placement.device), placement.backend)))
    _work(work_channel, Executor(shell, groups, pump, tracker, interrupts))


def _work(channel: Channel, executor: Executor) -> None:
    codec = at_rank_for_work()
    while True:
        try:
            parcels = codec.decode(channel.receive())
        except ProtocolError as error:
            # Whose answer is missing cannot be told: end, and let the agent tell that.
            print(f"cellmesh: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
        except KeyboardInterrupt:  # its run had just ended
            continue
        last = len(parcels) - 1
        for index, parcel in enumerate(parcels):
            executor.execute(parcel, more_follows=index < last)


class _ControlThread:
    """Answers at once, whatever the main thread does."""

    def __init__(
        self,
        channel: Channel,
        shell: RankShell,
        groups: Groups,
        interrupts: Interrupts,
        device: torch.device,
    ) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._shell = shell
        self._groups = groups
        self._interrupts = interrupts
        self._device = device

    def serve(self) -> None:
        """Answer until the process ends."""
        codec = at_rank_for_control()
        while True:
            try:
                for verb, _ in codec.decode(self._channel.receive()):
                    self._handle(verb)
            except ProtocolError as error:
                print(error, file=sys.__stderr__)

    def _handle(self, verb: Any) -> None:
        match verb:
            case Interrupt():
                if self._interrupts.request(verb.run):
                    # What it started and waits for (`os.system`, a pipeline) is to end as well; its terminal
                    # would tell the whole group.
                    signal_own_group(signal.SIGINT)
                    threading.Thread(target=self._release_if_stuck, args=(verb.run,), daemon=True).start()
            case Probe():
                self._answer(Parcel(self._state(verb.request)))
            case Peek():  # beside: properties and statistics may take their time
                threading.Thread(target=lambda: self._answer(self._peek(verb)), daemon=True).start()
            case Leave():
                _leave()

    def _answer(self, parcel: Parcel[Any]) -> None:
        with self._lock:
            self._channel.send(encode([parcel]))

    def _release_if_stuck(self, run: int) -> None:
        """The main thread may sit in C++ and not see its signal: then cut what it waits for.

        What it does with an interrupt that it has seen (an ``except`` that saves a checkpoint) is its own
        affair, unless that waits in a collective again; and C++ that computes is waited for.
        """
        while self._interrupts.running == run:
            waits = look_at_main_thread(self._shell).collective != ""
            if not waits:
                time.sleep(_UNWIND_S)
                waits = look_at_main_thread(self._shell).collective != "" or (
                    self._interrupts.is_pending(run) and main_thread_sleeps()
                )
            if waits and self._interrupts.running == run and self._groups.release():
                print(
                    "this rank was freed from a collective: its process groups are of no further use, and "
                    "%dist_restart makes new ones",
                    file=sys.stderr,
                )
                return

    def _state(self, request: int) -> RankState:
        run = self._interrupts.running
        seen = look_at_main_thread(self._shell)
        busy = run >= 0
        return RankState(
            request=request,
            run=run,
            execution_count=seen.execution_count if busy else 0,
            line=seen.line if busy else 0,
            where=seen.where if busy else "",
            collective=seen.collective if busy else "",
            device=str(self._device),
            device_bytes=self._device_bytes(),
        )

    def _device_bytes(self) -> int:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        return torch.cuda.memory_reserved(self._device)

    def _peek(self, verb: Peek) -> Parcel[Done | Failed]:
        try:
            if not is_quiet(verb.expression):
                raise CellmeshError(
                    f"the rank is busy, and {verb.expression!r} would have to run code: while a cell runs, "
                    "inspect names, attributes and indices only"
                )
            facts = describe(eval(verb.expression.strip(), self._shell.user_ns))
            pickled, buffers = payload.dumps(facts, verb.expression, reduce_for_notebook)
            return Parcel(Done(verb.run, pickled), tuple(buffers))
        except BaseException as error:
            text = str(error)
            kind = type(error).__name__
            return Parcel(Failed(verb.run, kind, text, f"{kind}: {text}", 0))


def _shower(pump: Pump, tracker: RunTracker) -> Show:
    def show(kind: DisplayKind, bundle: bytes, display_id: str) -> None:
        display = Parcel(Display(tracker.current(), kind, bundle, display_id))
        if kind == "display":
            pump.display(display, str(json.loads(bundle)["data"].get("text/plain", "a display")))
        else:
            pump.send(display)

    return show


def _set_environment(options: RankOptions) -> None:
    """What torchrun sets (torch.distributed.elastic), so that code written for it runs unchanged."""
    os.environ.update(
        RANK=str(options.rank),
        LOCAL_RANK=str(options.local_rank),
        WORLD_SIZE=str(options.world_size),
        LOCAL_WORLD_SIZE=str(options.num_local_ranks),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_NAME="default",
        ROLE_RANK=str(options.rank),
        ROLE_WORLD_SIZE=str(options.world_size),
        MASTER_ADDR=options.master_addr,
        MASTER_PORT=str(options.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(options.incarnation),
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_RUN_ID=options.mesh_name,
        OMP_NUM_THREADS=str(options.num_threads),
    )
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    if options.master_addr == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _reseed() -> None:
    """Forked ranks share the zygote's generators; separate processes would not."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _leave() -> None:
    import atexit

    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(0)
