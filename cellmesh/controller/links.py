"""Links: process groups over the ranks of two meshes, which this process keeps connected.

A link is connected anew after each failure in either mesh, as its ranks may have begun different
numbers of operations. Each connection has a number; ranks get it twice, beside their work, which
ends operations on the earlier connection, and in the order of their work, before what is sent next.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CellmeshError, HostError, MeshUsageError
from ..wire.groups import FindStore, LinkState, SetLink
from ..wire.messages import Channel, Died, Done, Failed, MeshReady
from .core.effects import Change, HealReport
from .core.mesh_state import HostLost
from .mesh import Mesh
from .meshes import given_gpus, gpus_of, own_meshes
from .news import News
from .output.console import ConsoleSink
from .rank_set import RankSet
from .run import Run

if TYPE_CHECKING:
    from .session.session import Session

# How long idle ranks wait for each other to connect, and how often that is tried.
_PATIENCE_S, _MAX_TRIES = 10.0, 3
# How long a rank may take to answer where its mesh's store is.
_ANSWER_S = 30.0
_STOPPED = "its connection was stopped on a rank"


class MeshLink:
    """A process group over the ranks of two meshes; made by `link`.

    Args:
        name: name of the link.
        sessions: sessions of the two meshes.
        addresses: of each mesh, the address of its c10d store.

    Attributes:
        name: name of the link.
        problem: why it is not connected; "" if it is.
    """

    def __init__(self, name: str, sessions: tuple[Session, Session], addresses: list[str]) -> None:
        self.name, self.problem = name, "it is being connected"
        self._sessions, self._addresses = sessions, addresses
        self._sizes, self._spec = self._size(), SetLink(name, 0, "open", "it is new")
        self._num_tries, self._answers = 0, list[str]()
        self._is_tried = False  # whether ranks wait for each other to connect
        self._runs = list[Run[Any]]()  # in which they do
        self._lock, self._news = threading.RLock(), News()

    def __repr__(self) -> str:
        a, b = (f"{each.name} ({each.num_ranks} ranks)" for each in self._sessions)
        return f"<link {self.name!r} of {a} and {b}: {self.problem or 'connected'}>"

    def drop(self) -> None:
        """Drop the link: operations on its group raise on all ranks from now on."""
        self._drop("it was dropped")

    def wait(self, timeout_s: float) -> bool:
        """Wait until the link is connected or dropped; return whether it is connected."""
        self._news.wait_for(lambda: not self.problem or self._spec.state == "dropped", timeout_s)
        return not self.problem

    def await_tries(self) -> bool:
        """Wait until no rank tries to connect, for a limited time; return whether one did."""
        until, tried = time.monotonic() + _MAX_TRIES * _PATIENCE_S, False
        while running := [run for run in self._runs if not run.done()]:
            tried = running[0].wait(until - time.monotonic())
            if not tried:
                break
        return tried

    # ---- for the sessions, on their threads

    def note(self, mesh: str, change: Change) -> None:
        """Handle a change of one of the meshes."""
        match change.cause:
            case _ if change.state in ("stopping", "ended"):
                self._drop(f"{mesh} has ended")
            case Died(rank, reason) | HostLost(_, (rank, *_), reason):
                self.renew("failed", f"rank {rank} of {mesh} {reason}")
            case MeshReady() | None if change.state in ("ready", "restarting"):
                self.renew("failed", f"{mesh} was restarted")
            case HealReport(respawned=new) if new or self._sizes != self._size():
                what = "was healed" if self._sizes == self._size() else "was resized"
                self.renew("open", f"{mesh} {what}")

    def note_end(self, mesh: str, run: Run[Any]) -> None:
        """Handle the end of a run on one of the meshes: a failed one may have left operations on
        the link unfinished.
        """
        rank, verb = next(
            ((r, each) for r, each in run.outcomes().items() if type(each) is not Done), (-1, None)
        )
        if run.is_query or type(verb) is not Failed:  # `note` handles deaths
            return
        if run.interleaves and verb.type_name == "CancelledError":
            return
        is_stopped = verb.type_name == "KeyboardInterrupt"
        how = "was interrupted" if is_stopped else f"raised {verb.type_name}"
        self.renew("failed", f"rank {rank} of {mesh} {how}")

    # ---- connecting

    def renew(self, state: LinkState, reason: str, num_tries: int = 0) -> None:
        """Give up the connection, and make another if both meshes are whole."""
        with self._lock:
            lack = next(_lacks(self._sessions), "")
            if self._change(state, reason, lack):
                self.problem = f"it is down: {lack}" if lack else "it is being connected"
                self._num_tries = num_tries
                self._connect()

    def _change(self, state: LinkState, reason: str, lack: str = "") -> bool:
        """Give the link another state, and send it to the ranks beside their work; return False if
        the link was dropped before.
        """
        if self._spec.state == "dropped":
            return False
        # Later than those of earlier links of the name, also of another process.
        number, self._sizes = max(self._spec.number + 1, time.time_ns()), self._size()
        (port, address), backend = self._store(), _choose_backend(self._sessions)
        self.problem, place = reason, (0, sum(self._sizes), address, port)
        self._spec = SetLink(self.name, number, state, reason, lack, *place, backend)
        self._send("control")
        return True

    def _connect(self) -> None:
        """Have the ranks connect, in the order of their work, but wait for each other only if none
        of them is busy: else once more when all have come to it.
        """
        self._answers.clear()
        is_busy = any(each.runs.busy_ranks() for each in self._sessions)
        self._is_tried = not (is_busy or self._spec.lack)
        self._runs = self._send("work", _PATIENCE_S if self._is_tried else 0.0)
        for run in self._runs if not self._spec.lack else ():
            run.on_end(functools.partial(self._note_answers, self._spec.number, run))

    def _note_answers(self, number: int, run: Run[Any]) -> None:
        with self._lock:
            if number != self._spec.number:
                return
            has_failed = run.failed_ranks()
            self._answers.append(_STOPPED if has_failed else max(run.result().values()))
            if len(self._answers) < len(self._sessions):
                return
            self.problem = max(self._answers)
            if self.problem and not self._is_tried:
                self._connect()
            elif self.problem and self._num_tries + 1 < _MAX_TRIES:
                self.renew(self._spec.state, self._spec.reason, self._num_tries + 1)
            self._news.report()

    def _drop(self, reason: str) -> None:
        with self._lock:
            if self._change("dropped", reason):
                for session in self._sessions:
                    session.links.pop(self.name, None)
                self._send("work")
                self._news.report()

    def _send(self, channel: Channel, patience_s: float = 0.0) -> list[Run[Any]]:
        first, runs = 0, list[Run[Any]]()
        for session, size in zip(self._sessions, self._sizes, strict=True):
            request = msgspec.structs.replace(self._spec, first=first, patience_s=patience_s)
            first += size
            living = [rank for rank in range(size) if rank not in session.core.lost]
            if not living:
                continue
            with contextlib.suppress(CellmeshError):  # it has ended, or is not ready
                ranks, title = RankSet(session, living), f"the link {self.name!r}"
                runs.append(ranks.start(request, title, channel=channel, sink=ConsoleSink()))
        return runs

    def _size(self) -> tuple[int, ...]:
        return tuple(each.core.mesh.num_ranks for each in self._sessions)

    def _store(self) -> tuple[int, str]:
        """Return port and address of the first mesh's c10d store; of the other's if it has none."""
        for session, address in zip(self._sessions, self._addresses, strict=True):
            if port := session.core.mesh.store_port:
                return port, session.core.mesh.store_address or address
        return 0, ""


def _lacks(sessions: tuple[Session, Session]) -> Iterator[str]:
    for session in sessions:
        if session.core.state != "ready":
            yield f"{session.name} is {session.core.state}"
        for rank, died in sorted(session.core.dead.items()):
            yield (
                f"rank {rank} of {session.name} {died.reason}. `%dist_heal --on {session.name}` "
                f"(cellmesh.meshes[{session.name!r}].heal()) replaces it"
            )


def _choose_backend(sessions: tuple[Session, Session]) -> str:
    """Return the backend that all ranks have; gloo if they differ or share GPUs."""
    given = given_gpus({})
    first, second = ({*gpus_of(each.ticket, given)} for each in sessions)
    found = {info.backend for each in sessions for info in each.core.mesh.ranks}
    if len(found) == 1 and not ("nccl" in str(found) and first & second):
        return found.pop()
    return "cpu:gloo,cuda:gloo" if "cuda" in str(found) else "gloo"


def link(a: Mesh, b: Mesh, name: str = "weights", timeout_s: float = 60.0) -> MeshLink:
    """Connect the ranks of two meshes by a process group. Blocks, while ranks are busy.

    On the ranks, ``cellmesh.group(name)`` is the group, for ``torch.distributed``: ranks of `a`
    come first. It is made again after a failure in either mesh, and when one is healed, restarted
    or resized; operations in progress then raise on all ranks. A mesh's end drops the link.

    Args:
        a, b: meshes of this process; one of them has a process group.
        name: name of the link, an identifier that no other link of the meshes has.
        timeout_s: how long to wait for the ranks, in seconds.

    Raises:
        MeshUsageError: the meshes cannot be linked, or the name cannot be used.
        RankDied: a rank is dead.
        HostError: the ranks could not be connected in time.
    """
    sessions = _check(a, b, name)
    addresses = []
    for each in sessions:
        asked = RankSet(each, (0,), is_single=True).start(FindStore(), channel="control")
        addresses.append(asked.result(_ANSWER_S))
    made = MeshLink(name, sessions, addresses)
    if not made._store()[0]:
        raise MeshUsageError(
            f"neither {a.name} nor {b.name} has a process group, and so no store through which "
            "their ranks could meet: start one of them with a group"
        )
    try:
        for each in sessions:
            each.links[name] = made
        made.renew("open", "it is new")
        if made.wait(timeout_s):
            return made
        busy = [f"{each.name} ({len(each.runs.busy_ranks())} ranks busy)" for each in sessions]
        raise HostError(
            f"{' and '.join(busy)} were not linked within {timeout_s:g} s: {made.problem}"
        )
    except BaseException:
        made.drop()
        raise


def _check(a: Any, b: Any, name: Any) -> tuple[Session, Session]:
    for mesh in (a, b):
        if not isinstance(mesh, Mesh):
            raise MeshUsageError(
                f"cellmesh.link takes two meshes, and {mesh!r} is none: "
                "cellmesh.link(cellmesh.meshes['trainer'], cellmesh.meshes['generator'])"
            )
    sessions = a.rank_set.session, b.rank_set.session
    for mesh, session in zip((a, b), sessions, strict=True):
        session.runs.check_usable(range(session.num_ranks))
        if own_meshes().get(mesh.name) is not mesh:
            raise MeshUsageError(f"{mesh.name} is no mesh of this process: cellmesh.meshes has all")
    if a is b:
        raise MeshUsageError(
            f"{a.name} cannot be linked with itself: its ranks have a group, and "
            "torch.distributed.new_group makes others"
        )
    if not (isinstance(name, str) and name.isidentifier()):
        raise MeshUsageError(f"{name!r} is no name of a link: use an identifier, as 'weights'")
    for session in sessions:
        if name in session.links:
            raise MeshUsageError(
                f"{session.name} has a link {name!r} ({session.links[name]!r}): choose another "
                "name, or .drop() that one"
            )
    if a.rank_set.session.has_hosts != b.rank_set.session.has_hosts:
        local = b if a.rank_set.session.has_hosts else a
        raise MeshUsageError(
            f"{local.name} runs on this machine alone, and other hosts cannot reach it: start it "
            "with hosts as well"
        )
    return sessions
