"""The processes of a mesh on this host (zygote, store, ranks): forks, watches and reaps them.

Carries out a `Supervisor`'s decisions about processes. A pidfd reports the end of each.
"""

from __future__ import annotations

import collections
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...wire import marks
from ...wire.codec import Frame, Parcel, at_agent_from_rank
from ...wire.environment import Surroundings
from ...wire.faults import Faults
from ...wire.messages import Channel, Done, Failed, RankUnready, Relay
from ...wire.stream import pack
from ...wire.ticket import Ticket, path_of_ranks
from ...wire.verbs import Output, StreamName
from .. import linux_process
from ..rank.stdout import Log, read_log
from ..zygote import ZygoteFailed, ZygoteReady
from .death_report import (
    OomWatch,
    explain_kill,
    explain_mismatch,
    explain_refusal,
    last_lines,
)
from .events import Events, Order
from .merger import Answers, find_answers
from .rank_link import Lending, RankLink
from .supervisor import Action, Fork, Supervisor
from .zygote_client import ZygoteClient

_LAST_BYTES = 32 * 1024
# How many plain answers are recognized, and the size of their headers.
_MAX_ANSWERS, _MAX_HEADER = 100, 2_000
# An agent reads the pipes of ranks before their sockets; text in a pipe that it has read so shortly
# before the end of a run may be later than that.
_PIPE_AHEAD_S = 1.0
# faulthandler lists all loaded extension modules, in one line of 5 kB.
_MODULES = "Extension modules:"
# Warning of c10d on a host whose address has no name; it has no consequences.
_NO_HOSTNAME = "The hostname of the client socket cannot be retrieved"
# A store or zygote that ends is replaced at once, so that a heal finds it. After this many ends in
# this many seconds, it is replaced only when ranks are forked. A store that cannot live ends ten
# times a second, a zygote once in some seconds.
_MAX_ENDS = {"store": (10, 10.0), "zygote": (3, 60.0)}


@dataclass(eq=False)
class Processes:
    """The processes of a mesh on this host (zygote, store and ranks): forks, watches, kills and
    reaps them as a `Supervisor` decides.
    """

    _ticket: Ticket
    _events: Events
    _faults: Faults  # handles errors of reports, which are sent nevertheless
    _supervisor: Supervisor  # decides on processes and on ranks' messages
    _act: Callable[[Sequence[Action]], None]  # carries out the supervisor's actions
    _zygote: ZygoteClient | None  # initially the first one

    def __post_init__(self) -> None:
        self._decode = at_agent_from_rank().decode
        # The last plain answers by their headers, as other ranks mostly send equal ones.
        self._answers: dict[bytes, Answers] = {}
        self._logs = {rank: Log(self.log_path(rank)) for rank in self._ticket.ranks}
        # Ranks that have printed since they last ended a run, and where their logs ended then.
        self._printed: set[int] = set()
        self._run_ends: dict[int, tuple[int, int]] = {}
        # When the last text of a rank's pipe was read, and where its log ended before that.
        self._piped: dict[int, tuple[float, tuple[int, int]]] = {}
        self._links: dict[int, RankLink] = {}
        self._unheard: Collection[int] = ()
        self.lending = Lending()
        self._children: set[int] = set()  # children whose end has a handler of its own
        self._num_gpus = 0
        self._store_pid = 0
        self._oom_watch = OomWatch()
        self.store_address = self._ticket.part.address or linux_process.LOOPBACK
        self._store_end = ""  # how the last store ended, until there is a new one
        self._ends: dict[str, collections.deque[float]] = {}  # of the zygote, and of the store
        self._zygote_is_ready = False
        # The ranks' `sys.path`; None until the user's modules are placed on this host.
        self._sys_path = None if self._ticket.roots else path_of_ranks(self._ticket, ())
        self._changes = Surroundings()  # changes of environment and working directory
        self.dims = self._ticket.mesh_dim_names, self._ticket.mesh_shape
        if self._zygote is not None:
            self._take_zygote(self._zygote)

    def fork(self, order: Fork) -> None:
        """Fork ranks, now or once the zygote is ready."""
        try:
            if self._zygote is None:
                self._take_zygote(ZygoteClient(self._ticket))
            if self._zygote is None or not self._zygote_is_ready:
                return  # `zygote_ready` of the supervisor asks again
            links = [
                RankLink(
                    self._events,
                    functools.partial(self._hear_text, rank),
                    functools.partial(self._hear_rank, rank),
                    functools.partial(self._rank_broke, rank),
                )
                for rank in order.ranks
            ]
        except OSError as error:
            self._act(self._supervisor.fail(f"cannot fork {len(order.ranks)} ranks: {error}"))
            return
        owns_store = self._ticket.group and self._supervisor.owns_store
        needs_store = not self._supervisor.store_port and owns_store
        store = self._listen() if needs_store else None
        if not order.rejoin:  # all ranks are new: end all processes that the old ones started
            spared = {self._zygote.pid, self._store_pid}
            linux_process.end_descendants(self._ticket.mark, spared)
        part = self._ticket.part
        common = {
            "world_size": self._ticket.num_ranks,
            "first_local_rank": part.first_rank,
            "local_world_size": part.num_ranks,
            "group_rank": part.index,
            "group_world_size": part.num_hosts,
            "interface": part.interface or "lo",
            "master_addr": self.store_address,
            "num_gpus": self._num_gpus,
            "num_threads": linux_process.num_threads_for(part.num_ranks, self._environment()),
            "backend": self._ticket.backend,
            "mesh_dim_names": self.dims[0],
            "mesh_shape": self.dims[1],
            "master_port": store.getsockname()[1] if store else self._supervisor.store_port,
            "incarnation": order.incarnation,
            "num_resizes": self._ticket.num_resizes,
            "agent_pid": os.getpid(),
            "mesh_name": self._ticket.name,
            "rejoin": order.rejoin,
        }
        pids = self._zygote.fork(
            store,
            [
                {**common, "rank": rank, "log_path": str(self.log_path(rank))}
                for rank in order.ranks
            ],
            [link.theirs for link in links],
        )
        if store is not None:
            self._take_store(store, pids[:1])
            pids = pids[1:]
        for link in links:
            link.close_theirs()
        forked = {rank: pid for rank, pid in zip(order.ranks, pids, strict=False) if pid}
        for rank, link in zip(order.ranks, links, strict=True):
            if (pid := forked.get(rank)) is None:
                link.close()
                continue
            link.start()
            link.hear(rank not in self._unheard)
            self._links[rank] = link
            if order.rejoin or order.incarnation > 1:
                self._logs[rank].append(f"{_new_process(rank, pid)}\n")
            self._watch_child(pid, functools.partial(self._rank_ended, rank, pid))
        self._act(self._supervisor.forked(forked))
        if self._zygote.problem:
            text = (
                f"only {len(forked)} of {len(order.ranks)} ranks could "
                f"be forked: {self._zygote.problem}"
            )
            self._act(self._supervisor.fail(text))

    def change_surroundings(self, changes: Surroundings) -> None:
        """Change the environment variables or the working directory with which ranks are forked
        from now on.
        """
        environment = {**self._changes.environment, **changes.environment}
        self._changes = Surroundings(environment, changes.cwd or self._changes.cwd)
        if self._zygote is not None and self._zygote_is_ready:
            self._zygote.change_surroundings(changes)

    def _environment(self) -> dict[str, str]:
        """Return the environment variables that ranks are forked with."""
        changed = {os.fsdecode(n): value for n, value in self._changes.environment.items()}
        kept = {**os.environ, **self._ticket.env}
        return {name: kept[name] for name in kept.keys() - changed.keys()} | {
            name: os.fsdecode(value) for name, value in changed.items() if value is not None
        }

    def kill(self, ranks: Sequence[int]) -> None:
        """Send SIGKILL to the processes of these ranks."""
        pids = self._supervisor.pids()
        linux_process.kill([pids[rank] for rank in ranks if rank in pids])

    def send(self, ranks: Sequence[int], channel: Channel, frames: Sequence[Frame]) -> None:
        """Write a message to the work or control sockets of ranks."""
        packed = pack(frames)
        for rank in ranks:
            link = self._links.get(rank)
            if link is not None:
                link.send(channel, packed)

    def relay(self, orders: Iterable[Parcel[Relay]]) -> list[Action]:
        """Pass a controller's orders on to ranks; the shared memory to which the orders refer must
        be on this host.
        """
        actions: list[Action] = []
        for order, frames in orders:
            if order.lends:
                frames = self.lending.lend(order, frames, self._supervisor.pids())
            actions += self._supervisor.relay(order, frames)
        return actions

    def hear(self, unheard: Collection[int]) -> None:
        """Read messages of all ranks except these, as too many of theirs wait in the agent."""
        self._unheard = unheard
        for rank, link in self._links.items():
            link.hear(rank not in unheard)

    def resize(self, ticket: Ticket) -> None:
        """Take over a resized mesh's shape, and the list of its ranks on this host, from a new
        ticket.
        """
        self._ticket, self.dims = ticket, (ticket.mesh_dim_names, ticket.mesh_shape)
        for rank in ticket.ranks:
            self._logs.setdefault(rank, Log(self.log_path(rank)))

    def log_path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self._ticket.logs / f"rank{rank}.log"

    def reap_orphans(self) -> None:
        """Reap ended processes that user code had started on ranks that have ended since."""
        linux_process.reap_children_except(self._children)

    # ---- messages and ends of ranks

    def _hear_rank(self, rank: int, frames: Sequence[Frame]) -> None:
        if self._supervisor.runs_script(rank) and (link := self._links.get(rank)):
            link.read_pipes()  # else its last text may follow its answer
        now = time.monotonic()
        is_short = len(frames) == 1 and len(frames[0]) < _MAX_HEADER
        header = bytes(frames[0]) if is_short else b""
        answers = self._answers.get(header)
        if answers is None:
            parcels: Sequence[Parcel[Any]] = self._decode(frames)
            if is_short and (answers := find_answers(header, parcels)) is not None:
                if len(self._answers) >= _MAX_ANSWERS:
                    del self._answers[next(iter(self._answers))]
                self._answers[header] = answers
        else:
            parcels = answers.parcels
        if answers is not None and not self.lending.lent:
            if rank in self._printed:
                self._note_run_end(rank, now)
            try:
                self._supervisor.answered(rank, answers, now)
            except Exception as error:
                self._faults.take(error)
            return
        for parcel in parcels:
            kind = type(parcel.verb)
            if kind is Output:
                self._printed.add(rank)
            elif rank in self._printed and (kind is Done or kind is Failed):
                self._note_run_end(rank, now)
            if parcel.buffers or self.lending.lent or kind is Failed:
                parcel = self.lending.note(rank, parcel, self._links.get(rank))
            if kind is RankUnready and self._is_start_lost():
                # A consequence: the pidfd of the process that has ended reports the cause.
                continue
            try:
                if actions := self._supervisor.from_rank(rank, parcel, now):
                    self._act(actions)
            except Exception as error:  # go on with the rank's other messages
                self._faults.take(error)

    def _note_run_end(self, rank: int, now: float) -> None:
        self._printed.discard(rank)
        read_s, position = self._piped.pop(rank, (0.0, (0, 0)))
        # The rank may have written that text after the run, as its last words.
        is_new = now < read_s + _PIPE_AHEAD_S
        self._run_ends[rank] = position if is_new else self._logs[rank].position()

    def _rank_broke(self, rank: int, error: Exception | None) -> None:
        """Kill a rank because user code has closed its sockets to the agent, or has written invalid
        data to them (`error`).
        """
        pid = self._supervisor.pids().get(rank, 0)
        if error is not None:
            why = f"wrote into its connection to the agent what is no message ({error})"
        elif linux_process.is_ending(pid):
            return  # its pidfd will report how it ended
        else:
            why = "closed its connection to the agent (os.exec*, os.closerange, os.close?)"
        self._logs[rank].append(f"cellmesh: rank {rank} {why}\n")
        self._act(self._supervisor.kill((rank,), f"{why}: killed"))

    def _is_start_lost(self) -> bool:
        """Return whether, while ranks start, a process that they need (a rank, the zygote or the
        c10d store) has begun to end.
        """
        needed = [self._store_pid, *self._supervisor.pids().values()]
        if self._zygote is not None and self._supervisor.unforked:
            needed.append(self._zygote.pid)
        return self._supervisor.state == "starting" and any(
            linux_process.is_ending(pid) for pid in needed if pid
        )

    def _hear_text(self, rank: int, stream: StreamName, text: str, data: bytes) -> None:
        if stream == "stderr" and _NO_HOSTNAME in text:
            lines = text.splitlines(keepends=True)
            text, data = "".join(line for line in lines if _NO_HOSTNAME not in line), b""
        if not (text or data):
            return
        now = time.monotonic()
        self._printed.add(rank)
        self._piped[rank] = now, self._logs[rank].position()
        self._logs[rank].append(text)
        self._act(self._supervisor.from_pipe(rank, stream, text, now, data))

    def _rank_ended(self, rank: int, pid: int) -> None:
        reason, last_output = self._faults.attempt(lambda: self._bury(rank, pid), ("ended", ""))
        orders = self.lending.forget(rank)
        if not last_output and self._supervisor.state == "starting":  # the rank has no log yet
            last_output, _ = read_log(self._ticket.logs / "zygote.log", _LAST_BYTES)
        self._act(self._supervisor.rank_ended(rank, reason, last_output, time.monotonic()))
        self._act(self.relay(orders))
        # Processes that it started in sessions of their own; in other states all end soon.
        if self._supervisor.state == "ready":
            marks.end_carriers(marks.value_of(self._ticket.mark, pid))

    def _bury(self, rank: int, pid: int) -> tuple[str, str]:
        """Read the last messages of a dead rank, kill its process group, and reap its process.

        Returns:
            How the rank ended, and its last lines of output since it last ended a run.
        """
        link = self._links.get(rank)
        if link is not None:
            self._faults.guard(link.finish)
            del self._links[rank]
        # The rank's process group has its descendants; its number is not reused before the rank is
        # reaped.
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._printed.discard(rank)
        self._piped.pop(rank, None)
        num_bytes = self._logs[rank].num_bytes_since(self._run_ends.pop(rank, (0, 0)))
        text, _ = read_log(self.log_path(rank), min(num_bytes, _LAST_BYTES))
        text = text.rpartition(f"{_new_process(rank, pid)}\n")[2]
        lines = [line for line in text.splitlines() if line.strip() and _MODULES not in line]
        reason = self._reap_rank(pid, "\n".join(lines))
        return reason, "\n".join(last_lines(lines))

    def _reap_rank(self, pid: int, output: str) -> str:
        """Reap a rank's process; return text on how it ended, and on a lack of memory if that was
        the cause.
        """
        self._children.discard(pid)
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        was_killed = end is not None and (end.si_code, end.si_status) == (
            os.CLD_KILLED,
            signal.SIGKILL,
        )
        _, status, usage = os.wait4(pid, 0)
        reason, held_bytes = linux_process.describe_end(status), usage.ru_maxrss * 1024
        if was_killed:
            was_oom = self._oom_watch.has_struck(time.monotonic())
            return reason + (explain_kill(held_bytes) if was_oom else "")
        if os.waitstatus_to_exitcode(status) == -signal.SIGABRT:
            reason += explain_mismatch(output)
        return reason + explain_refusal(output, held_bytes)

    def _watch_child(self, pid: int, ended: Callable[[], None]) -> None:
        self._children.add(pid)
        self._events.watch_process(pid, ended)

    def _reap(self, pid: int) -> str:
        """Reap a child that has ended; return how it ended, as text."""
        self._children.discard(pid)
        return linux_process.describe_end(os.waitpid(pid, 0)[1])

    # ---- the zygote and the store

    def _may_replace(self, name: str) -> bool:
        """Record that the zygote or the c10d store has ended; return whether to replace it at once,
        which is not done if it ends too often.
        """
        (most, within_s), now = _MAX_ENDS[name], time.monotonic()
        ends = self._ends.setdefault(name, collections.deque(maxlen=most))
        is_often = len(ends) == most and now - ends[0] < within_s
        ends.append(now)
        return not is_often

    def _take_zygote(self, zygote: ZygoteClient) -> None:
        self._zygote, self._zygote_is_ready = zygote, False
        self._events.add(zygote.fileno(), Order.SOCKET, lambda event: self._hear_zygote(zygote))
        self._watch_child(zygote.pid, functools.partial(self._zygote_ended, zygote))
        if self._sys_path is not None:
            zygote.import_from(self._sys_path)

    @property
    def preloaded(self) -> str:
        """Sentence for users on the modules that ranks have had from the zygote."""
        return "" if self._zygote is None else self._zygote.preloaded

    def import_from(self, places: Sequence[str]) -> None:
        """Set the directories of the user's modules from which ranks of a mesh on many hosts
        import.
        """
        if self._sys_path is None:
            self._sys_path = path_of_ranks(self._ticket, places)
            if self._zygote is not None:
                self._zygote.import_from(self._sys_path)

    def _hear_zygote(self, zygote: ZygoteClient) -> None:
        match zygote.receive():
            case ZygoteReady(num_gpus, num_threads, preloaded):
                zygote.preloaded = preloaded
                if num_threads > 1 and self._ticket.preload:
                    self._act(
                        self._supervisor.fail(
                            f"--preload {','.join(self._ticket.preload)} starts threads "
                            f"({num_threads - 1}), and a process with threads cannot be forked: "
                            "import that on the ranks instead",
                            "user",
                        )
                    )
                    return
                if num_threads > 1:
                    print(f"the zygote has {num_threads} threads; forks may hang", file=sys.stderr)
                self._num_gpus, self._zygote_is_ready = num_gpus, True
                zygote.change_surroundings(self._changes)
                if self._store_end:
                    self._fork_store(zygote)
                self._act(self._supervisor.zygote_ready(num_gpus))
            case ZygoteFailed(text):
                self._act(self._supervisor.fail(text, "user"))
            case _:
                self._events.remove(zygote.fileno())

    def _zygote_ended(self, zygote: ZygoteClient) -> None:
        self._events.remove(zygote.fileno())
        zygote.close()
        self._zygote, self._zygote_is_ready = None, False
        text, _ = read_log(self._ticket.logs / "zygote.log", _LAST_BYTES)
        self._act(self._supervisor.zygote_ended(self._reap(zygote.pid), text))
        if self._zygote is not None or self._supervisor.state not in ("ready", "starting"):
            return
        if not self._may_replace("zygote"):
            if self._store_end:  # the zygote that has ended was to replace the store
                self._act(self._supervisor.store_ended(self._store_end))
            return
        try:
            self._take_zygote(ZygoteClient(self._ticket))
        except OSError as error:  # `fork` tries again
            print(f"the zygote could not be replaced: {error}", file=sys.stderr)

    def make_store(self) -> None:
        """Fork on this host, now or once the zygote is ready, a c10d store that replaces the one of
        a lost host.
        """
        self.store_address, self._supervisor.owns_store = self._ticket.part.address, True
        if self._zygote is not None and self._zygote_is_ready:
            self._fork_store(self._zygote)
        else:
            self._store_end = "was on a host that is lost"

    def _listen(self) -> socket.socket:
        return socket.create_server((self.store_address, 0), backlog=1024)

    def _fork_store(self, zygote: ZygoteClient) -> None:
        store = self._listen()
        self._take_store(store, zygote.fork(store))

    def _take_store(self, listener: socket.socket, pids: Sequence[int]) -> None:
        """Watch the store's process; `pids` has its number, or none or 0 if it was not forked."""
        with listener:
            port = listener.getsockname()[1]
        for pid in filter(None, pids):
            self._store_pid = pid
            self._act(self._supervisor.store_started(port))
            self._watch_child(pid, functools.partial(self._store_ended, pid))
        if any(pids) and self._store_end:
            reason, self._store_end = self._store_end, ""
            self._act(self._supervisor.store_ended(reason))

    def _store_ended(self, pid: int) -> None:
        self._store_end = self._reap(pid)
        self._supervisor.store_port = self._store_pid = 0
        may_renew = self._may_replace("store")
        if may_renew and self._zygote is not None and self._zygote_is_ready:
            self._fork_store(self._zygote)
        # In other cases a new zygote replaces it.
        if self._store_end and (self._zygote is None or not may_renew):
            self._act(self._supervisor.store_ended(self._store_end))


def _new_process(rank: int, pid: int) -> str:
    """Return the line that starts the output of a new process of a rank in the rank's log."""
    return f"cellmesh: rank {rank} is process {pid} from here"
