"""A rank's process: the main thread executes cells and calls, and a control thread answers the
controller at the same time.

Three sockets connect it to the agent: ``work`` (read by the main thread, written by the pump under
its lock), ``control`` (used by the control thread), and that of `value_transfer.SegmentLink`, which
the rank only writes.
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from ...errors import CellmeshError, ProtocolError
from ...wire import marks
from ...wire.codec import Parcel, at_rank_for_work, encode
from ...wire.groups import Heal
from ...wire.handles import openers
from ...wire.held_signals import hold_back
from ...wire.messages import RankReady, RankUnready, Resume, ToMainThread
from ...wire.stream import Channel
from ...wire.verbs import Display, DisplayKind
from ..groups.connections import raise_as_stops
from ..groups.group_factory import GLOO_SWITCHES, choose_placement
from ..groups.groups import Groups
from ..groups.rpc import let_waits_be_interrupted
from ..linux_process import LOOPBACK, die_with, name_command, name_process, num_unsent, write_stderr
from ..metrics import Reporter
from ..preload import ImportTimes
from ..run_tracker import RunTracker
from ..trace.recorder import Spans
from .child_processes import follow_children, guard_forks
from .control import ControlThread
from .executor import Executor
from .failures import Failures, find_lost_context, report_lost_context
from .features import RankContext
from .imports import AfterImport, build_whole_files, load
from .interrupts import Interrupts
from .memory import MemoryMeter
from .shell import RankShell
from .stdin import Asker
from .stdout import Log
from .streams import DISPLAYS, Pump, RankStream, Show
from .tasks import Tasks
from .value_transfer import NotebookClasses, SegmentLink

# Made before the fork: the types of its messages take a millisecond.
_CODEC = at_rank_for_work()


# The seed that each process has in older versions of torch; in newer ones, it is a random number.
_FIXED_SEED = 67280421310721


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a rank is forked with: its number, the mesh, and the store's address."""

    rank: int
    world_size: int
    num_gpus: int
    num_threads: int
    backend: str
    mesh_dim_names: tuple[str, ...]  # () without a process group
    mesh_shape: tuple[int, ...]
    master_port: int
    incarnation: int
    agent_pid: int
    log_path: str
    mesh_name: str
    master_addr: str = LOOPBACK
    interface: str = "lo"  # network interface to other ranks
    first_local_rank: int = 0  # lowest rank on this host
    local_world_size: int = 0
    group_rank: int = 0  # number of the host among the mesh's hosts
    group_world_size: int = 1
    num_resizes: int = 0  # number of resizes of the mesh before the fork
    rejoin: bool = False  # whether it replaces a dead rank: a `Heal` makes the groups

    @property
    def local_rank(self) -> int:
        """The rank's number among the ranks of its host."""
        return self.rank - self.first_local_rank


def run_rank(
    options: RankOptions,
    shell: RankShell,
    work: socket.socket,
    control: socket.socket,
    segments: socket.socket,
) -> None:
    """Run a rank from its fork to the end of its process; the sockets are the rank's ends of its
    connections to the agent.
    """
    name_process(f"cellmesh-r{options.rank}")
    name_command(f"cellmesh-r{options.rank} {options.mesh_name}")
    marks.claim()
    _set_environment(options)
    faulthandler.enable(file=2)
    torch.set_num_threads(options.num_threads)
    _reseed()

    work_channel = Channel(work)
    tracker = RunTracker()
    interrupts = Interrupts()
    pump = Pump(
        lambda parcels: work_channel.send(encode(parcels)), Log(Path(options.log_path)), interrupts
    )
    pump.num_unread = functools.partial(num_unsent, work.fileno())
    sys.stdout = RankStream("stdout", pump, tracker)
    sys.stderr = RankStream("stderr", pump, tracker)
    shell.connect(_shower(pump, tracker))
    asker = Asker(pump.send, tracker)
    asker.install(shell)
    reporter = Reporter(pump.send, tracker.current)
    shell.report_numbers = reporter.log
    shell.events.register("post_execute", reporter.flush)
    bars = None
    try:
        bars = load("progress").TqdmBars(pump.send, tracker.current, interrupts)
        bars.watch()
    except CellmeshError as error:
        say = functools.partial(print, f"cellmesh: {error}", file=sys.stderr)
        AfterImport(dict.fromkeys(("tqdm.std", "tqdm.notebook"), lambda _: say())).install()
    build_whole_files()
    sys.breakpointhook = lambda *args, **kwargs: load("rank.debugger").break_here(*args, **kwargs)
    tracker.follow_threads()
    interrupts.install()
    let_waits_be_interrupted()
    follow_children(tracker.current)
    pump.start()

    placement = choose_placement(
        options.backend, options.local_rank, options.local_world_size, options.num_gpus
    )
    groups = Groups(
        options.rank,
        options.world_size,
        placement,
        options.master_port,
        options.incarnation,
        options.num_resizes,
        Spans(tracker.records),
    )
    meter = MemoryMeter(placement.device)
    shell.call_at_heal, shell.find_group = groups.heal_callbacks.add, groups.find_link
    link = SegmentLink(segments, options.local_world_size)
    code = str(Path(options.log_path).parents[1] / "code/current")
    context = RankContext(shell, groups, interrupts, link, placement.device, code)
    openers[:] = [lambda address: context.handles.open(address)]
    context.steps.install()
    tasks = Tasks(interrupts, tracker, groups.ledger)
    shell.use_loop(tasks.run)
    context.tasks, context.divert, context.report = tasks, pump.divert, pump.send
    control_thread = ControlThread(Channel(control), context, asker, meter, tasks.calls)
    control_thread.start()
    names = {
        "rank": options.rank,
        "local_rank": options.local_rank,
        "world_size": options.world_size,
        "device": placement.device,
        "torch": torch,
        "dist": dist,
    }
    shell.push(names, interactive=False)  # type: ignore[no-untyped-call]
    NotebookClasses(shell.user_ns)
    try:  # only now, as it waits until all forks of its part are done
        die_with(options.agent_pid)
    except ProcessLookupError:
        os._exit(1)
    if options.mesh_dim_names and not options.rejoin:  # else a `Heal` follows, and makes the groups
        try:
            groups.initialize()
            shell.user_ns["mesh"] = groups.build_mesh(options.mesh_dim_names, options.mesh_shape)
        except BaseException as error:
            pump.send(Parcel(RankUnready(f"{type(error).__name__}: {error}")))
            threading.Event().wait()  # until the agent ends the process
    pump.send(Parcel(RankReady(str(placement.device), placement.backend)))
    import_times = ImportTimes()
    import_times.install()
    shell.stopped_by = lambda: control_thread.kind_of_stop(interrupts.running)
    raise_as_stops(shell.stopped_by, functools.partial(setattr, groups.ledger, "has_lost_peers"))
    executor = Executor(
        context,
        pump,
        tracker,
        Failures(shell, groups, control_thread.stop_of),
        meter,
        options.rejoin,
        import_times,
        tasks,
        bars,
    )
    guard_forks(
        options.rank, (work, control, segments), executor.end_as_child, shell.show_traceback
    )
    _work(work_channel, executor, pump, options.rank, shell.show_traceback)


def _work(
    channel: Channel,
    executor: Executor,
    pump: Pump,
    rank: int,
    render: Callable[[BaseException], str],
) -> None:
    """Execute cells, calls and requests in order; after a failed run, hold back queued ones until
    the process groups have been checked or rebuilt.

    Otherwise the collectives of queued work would meet other ranks' collectives of the failed run.
    """

    def report(error: BaseException) -> None:
        write_stderr(f"{render(error)}\n")

    raised: list[BaseException] = []
    inbox: collections.deque[Parcel[ToMainThread]] = collections.deque()
    held: list[Parcel[ToMainThread]] = []
    holds_back = False
    while True:
        if held and not (holds_back or executor.tasks.awaits_heal):
            inbox.extendleft(reversed(held))
            held.clear()
        tasks, is_empty = executor.tasks, not inbox
        if tasks.alive or is_empty:
            try:
                has_message = True
                if tasks.alive:
                    has_message = tasks.turn(channel, not is_empty)
                elif tasks.wake >= 0:
                    has_message = tasks.wait(channel)
                if tasks.wake >= 0:
                    inbox.extend(tasks.take())
                if is_empty and has_message:  # also beside work of other ranks
                    inbox.extend(_CODEC.decode(channel.receive()))
            except KeyboardInterrupt:  # its run has just ended
                continue
            except BaseException as error:
                is_of_socket = isinstance(error, OSError) and error.errno is not None
                if is_of_socket or isinstance(error, (ProtocolError, EOFError)):
                    # Also if the socket was closed in this process. The run that lacks its answer
                    # is unknown: exit, so that the agent reports the rank's end.
                    print(f"cellmesh: {error}", file=sys.__stderr__, flush=True)
                    os._exit(1)
                raised.append(error)  # by a signal handler of user code (SIGALRM)
            while raised:  # not in the handler, whose error would be the context
                hold_back(functools.partial(report, raised.pop()), report)
            if not inbox:
                continue
        parcel = inbox.popleft()
        if isinstance(parcel.verb, Resume):
            holds_back = tasks.awaits_heal = False
        elif (holds_back or tasks.awaits_heal) and not isinstance(parcel.verb, Heal):
            if not executor.pass_over(parcel.verb.run, more_follows=bool(inbox)):
                held.append(parcel)
        else:
            try:
                if isinstance(parcel.verb, Heal):
                    work = functools.partial(executor.execute, parcel, bool(inbox))
                    tasks.awaits_heal = not (is_done := hold_back(work, report))
                else:
                    is_done = executor.execute(parcel, more_follows=bool(inbox))
            except BaseException as error:
                raised.append(error)
            if raised:
                rescue = functools.partial(executor.rescue, parcel.verb.run, raised.pop())
                is_done = hold_back(functools.partial(rescue, bool(inbox)), report)
            if not is_done and (loss := find_lost_context()):
                report_lost_context(rank, loss)
                pump.flush()
                os._exit(1)  # exit handlers would call CUDA, too
            holds_back = not is_done
        del parcel  # a large value does not stay until the next work


def _shower(pump: Pump, tracker: RunTracker) -> Show:
    def show(kind: DisplayKind, bundle: bytes, display_id: str) -> None:
        display = Parcel(Display(tracker.current(), kind, bundle, display_id))
        if kind == "clear":
            pump.send(display)
        else:
            pump.display(
                display, lambda: str(json.loads(bundle)["data"].get("text/plain", "a display"))
            )

    return show


def _set_environment(options: RankOptions) -> None:
    """Set the environment variables of torchrun (torch.distributed.elastic), so that code written
    for it runs unchanged.

    The exception, but for scripts, is TORCHELASTIC_USE_AGENT_STORE: with it, processes that a rank
    starts would all be clients of an address that one of them has to serve. The rank itself does
    not need it (`groups.program_calls`).
    """
    values = {
        "RANK": str(options.rank),
        "LOCAL_RANK": str(options.local_rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.local_world_size),
        "GROUP_RANK": str(options.group_rank),
        "GROUP_WORLD_SIZE": str(options.group_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(options.rank),
        "ROLE_WORLD_SIZE": str(options.world_size),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(options.incarnation - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": options.mesh_name,
        "TORCHELASTIC_ERROR_FILE": options.log_path.removesuffix(".log") + ".error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "OMP_NUM_THREADS": str(options.num_threads),
    }
    os.environ.update(values)  # by keywords, it would check all kinds of mappings: 200 pages
    choose_displays()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", options.interface)
    for switch in GLOO_SWITCHES:
        os.putenv(switch, os.environ.get(switch, "0"))
    # Else a rank could wait for a peer without a connection, and not be released.
    os.putenv("TORCH_GLOO_LAZY_INIT", "0")
    # For TensorPipe, the transport of torch.distributed.rpc.
    os.environ.setdefault("TP_SOCKET_IFNAME", options.interface)
    if options.group_world_size > 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", options.interface)


def choose_displays() -> None:
    """Set the variables of `DISPLAYS` that are not set."""
    for name, value in DISPLAYS.items():
        os.environ.setdefault(name, value)


def _reseed() -> None:
    """Reseed random generators, as forked ranks would otherwise share the zygote's state."""
    random.seed()
    if torch.initial_seed() != _FIXED_SEED:
        torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
