"""Makes the agents of many hosts look like one agent: splits the controller's messages by host, and
joins the agents' messages that concern the whole mesh. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ....wire.attach import Detach, Detached, Refused, RunInfo, Welcome
from ....wire.codec import Parcel
from ....wire.hosts import Host
from ....wire.messages import (
    AgentFault,
    Died,
    Interrupt,
    Kill,
    MakeStore,
    MeshReady,
    Progress,
    ReadLog,
    Relay,
    Resize,
    Respawn,
    Respawned,
    RespawnFailed,
    Restart,
    StartFailed,
    Stop,
    Stopped,
    StoreDied,
    StoreUp,
    UseStore,
)
from ....wire.ranks import describe_ranks
from ....wire.status import HostReport, RankInfo, ReadHost
from ...core.mesh_state import HostLost, Returned
from ...core.requests import control

_T = TypeVar("_T")


class Routed(msgspec.Struct):
    """The messages that a `Fan` passes on to the controller and to agents after one message or
    event.

    Attributes:
        up: messages for the controller.
        down: (index of a host, message) for agents.
    """

    up: list[Parcel[Any]] = msgspec.field(default_factory=list)
    down: list[tuple[int, Parcel[Any]]] = msgspec.field(default_factory=list)


class Fan:
    """The router of messages between a controller and the agents of its mesh's hosts.

    Args:
        agents: the agents, one a host, in the order of their ranks.
        lost: indices of the hosts that are lost already.

    Attributes:
        hosts: indices of the hosts that are not lost.
        joining: hosts among these that have taken the place of lost ones and are not ready yet.
        is_stopping: whether the controller has ended the mesh.
        is_welcome: whether every agent has accepted this controller; from then on, messages of
            ranks are passed on unchanged, except from hosts that are joining.
    """

    def __init__(self, agents: Sequence[Host], lost: Collection[int] = ()) -> None:
        self._agents = list(agents)
        self.hosts = set(range(len(agents))).difference(lost)
        self.joining: set[int] = set()
        self._returned: dict[int, tuple[Welcome, MeshReady | None]] = {}
        self._store: tuple[int, int] = (0, 0)  # host and port
        self._held: list[tuple[int, Parcel[Any]]] = []  # kept until `is_welcome`
        self._welcomes: dict[int, Welcome] = {}
        self.is_welcome = False
        self._progress: dict[int, Progress] = {}
        self._ready: dict[int, MeshReady] = {}
        self._reports = HostReports()
        self._dead: set[int] = set()
        self._has_failed = self.is_stopping = self._is_leaving = False
        self._ended: set[int] = set()  # hosts whose agents have reported their end
        # Of the last order to fork ranks again: the hosts' answers, the ranks by host, and the
        # ranks that no host can fork.
        self._respawns: Gathering[Respawned | RespawnFailed] = Gathering()
        self._forked_by: dict[int, tuple[int, ...]] = {}
        self._unforked = RespawnFailed((), "")

    @property
    def unended(self) -> list[Host]:
        """The agents that have not reported that they have ended."""
        return [each for index, each in enumerate(self._agents) if index not in self._ended]

    def name_of(self, index: int) -> str:
        """Return the name of the host with this index."""
        return self._agents[index].name

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(i for i, agent in enumerate(self._agents) if rank in agent.ranks)

    # ---- to the agents

    def split(self, parcel: Parcel[Any]) -> Routed:
        """Convert a message of the controller into messages for the agents that have to carry it
        out.
        """
        verb = parcel.verb
        match verb:
            case Relay() | Kill():
                return self._split_by_ranks(parcel)
            case Respawn():
                return self._respawn(parcel)
            case ReadLog(_, rank):
                return self._to([self.host_of(rank)], parcel)
            case ReadHost():
                hosts = {index for index in self.hosts if self._agents[index].num_ranks}
                self._reports.begin(verb.request, hosts)
                return self._add(self._to(hosts, parcel), Routed(self._joined_reports()))
            case Restart():
                self._ready.clear()
                self._progress.clear()
                self._dead.clear()
            case Resize(_, layout):
                self._resize(layout)
                orders = self._to(self.hosts, parcel)
                if self._store[0] >= len(layout):
                    orders.down.append(self._make_store())
                return orders
            case Stop():
                self.is_stopping = True
                returned = [(index, parcel) for index in sorted(self._returned)]
                return Routed(down=[*self._to(self.hosts, parcel).down, *returned])
            case Detach():
                self._is_leaving = True
        return self._to(self.hosts, parcel)

    def _resize(self, layout: Sequence[int]) -> None:
        """Set the number of ranks of each host to that in `layout`, and remove the hosts beyond its
        end from the mesh.
        """
        self._agents = [
            msgspec.structs.replace(agent, num_ranks=num_ranks)
            for agent, num_ranks in zip(self._agents, layout, strict=False)
        ]
        for index in [i for i in {*self.hosts, *self._returned} if i >= len(layout)]:
            self.hosts.discard(index)
            self._returned.pop(index, None)
            self.joining.discard(index)
            self._ready.pop(index, None)
            self._welcomes.pop(index, None)
            self._reports.forget(index)
        self._dead = {rank for rank in self._dead if rank < sum(layout)}

    def add(self, agent: Host) -> Routed:
        """Add a host to the mesh; it has no ranks until the mesh is resized."""
        self._agents.append(agent)
        return self.replace(len(self._agents) - 1, msgspec.structs.replace(agent, num_ranks=0))

    def keep(self, num_hosts: int) -> None:
        """Keep the first `num_hosts` hosts in the mesh, and remove all other hosts from it."""
        self._resize([agent.num_ranks for agent in self._agents[:num_hosts]])

    def why_lost(self, index: int) -> str:
        """Return the reason for which a host counts as lost."""
        return self._reports.why_lost[index]

    def _respawn(self, parcel: Parcel[Respawn]) -> Routed:
        routed = self._split_by_ranks(parcel)
        self._forked_by = {index: part.verb.ranks for index, part in routed.down}
        gone = tuple(r for r in parcel.verb.ranks if self.host_of(r) not in self.hosts)
        names = sorted({self.name_of(self.host_of(rank)) for rank in gone})
        self._unforked = RespawnFailed(gone, f"{', '.join(names)} is lost")
        self._respawns.begin(0, self._forked_by)
        routed.up += self._respawned()
        return routed

    def _respawned(self) -> list[Parcel[Any]]:
        """Join the hosts' answers to the last order to fork ranks; return [] until all hosts have
        answered.
        """
        up: list[Parcel[Any]] = []
        for _, answers in self._respawns.take(self.hosts):
            lost = [
                RespawnFailed(ranks, f"{self.name_of(index)} is lost")
                for index, ranks in self._forked_by.items()
                if index not in answers
            ]
            each = (self._unforked, *lost, *answers.values())
            failed = [one for one in each if isinstance(one, RespawnFailed) and one.ranks]
            if failed:  # first, as it ends the recovery's wait; the others join the next
                ranks = tuple(rank for one in failed for rank in one.ranks)
                text = "; ".join(one.text for one in failed if one.text)
                up.append(Parcel(RespawnFailed(ranks, text)))
            infos = [info for one in each if isinstance(one, Respawned) for info in one.ranks]
            if infos:
                up.append(Parcel(Respawned(tuple(infos))))
        return up

    def _note_respawn(self, index: int, answer: Respawned | RespawnFailed) -> Routed:
        is_awaited = self._respawns.add(0, index, answer)
        return Routed(up=self._respawned() if is_awaited else [Parcel(answer)])

    def _split_by_ranks(self, parcel: Parcel[Any]) -> Routed:
        routed = Routed()
        wanted = set(parcel.verb.ranks)
        for index in sorted(self.hosts):
            agent = self._agents[index]
            ranks = tuple([rank for rank in agent.ranks if rank in wanted])
            if ranks:
                verb = msgspec.structs.replace(parcel.verb, ranks=ranks)
                routed.down.append((index, Parcel(verb, parcel.buffers)))
        return routed

    def _to(self, hosts: Sequence[int] | set[int], parcel: Parcel[Any]) -> Routed:
        return Routed(down=[(index, parcel) for index in sorted(set(hosts) & self.hosts)])

    # ---- from the agents

    def join(self, index: int, parcel: Parcel[Any]) -> Routed:
        """Handle a message of one agent; return the messages to pass on to the controller and to
        other agents.
        """
        if index not in self.hosts:
            return self._note_return(index, parcel.verb)
        if index in self.joining:
            if isinstance(parcel.verb, MeshReady):
                self.joining.discard(index)
            if isinstance(parcel.verb, Welcome):
                self._welcomes[index] = parcel.verb
            if isinstance(parcel.verb, Welcome | MeshReady | Progress):
                return Routed()
            if isinstance(parcel.verb, Refused | Detached):
                return self.lose(index, parcel.verb.reason)
        if isinstance(parcel.verb, Welcome):
            self._welcomes[index] = parcel.verb
            return self._all_welcomed() if self.hosts <= self._welcomes.keys() else Routed()
        if not self.is_welcome and not isinstance(parcel.verb, Refused | Detached):
            # The runs in flight are known once every agent has listed its own.
            self._held.append((index, parcel))
            return Routed()
        return self._join(index, parcel)

    def _all_welcomed(self) -> Routed:
        self.is_welcome = True
        first = self._welcomes[min(self._welcomes)]
        runs: dict[int, RunInfo] = {}
        for welcome in self._welcomes.values():
            for info in welcome.runs:
                ranks = runs[info.run].ranks if info.run in runs else ()
                joined = tuple(sorted({*ranks, *info.ranks}))
                runs[info.run] = msgspec.structs.replace(info, ranks=joined)
        merged = msgspec.structs.replace(
            first,
            next_run=max(welcome.next_run for welcome in self._welcomes.values()),
            runs=tuple(runs[run] for run in sorted(runs)),
            away_s=max(welcome.away_s for welcome in self._welcomes.values()),
        )
        routed = Routed(up=[Parcel(merged)])
        held, self._held = self._held, []
        for index, parcel in held:
            self._add(routed, self._join(index, parcel))
        return routed

    def _join(self, index: int, parcel: Parcel[Any]) -> Routed:
        verb = parcel.verb
        match verb:
            case Progress():
                self._progress[index] = verb
                num_ready = sum(each.num_ready for each in self._progress.values())
                return Routed(up=[Parcel(Progress(verb.stage, num_ready))])
            case MeshReady():
                self._ready[index] = verb
                self._reports.note_ranks(index, verb.ranks)
                if not self._store[1]:  # attached to a mesh that was started before
                    self._find_store(verb)
                return self._all_ready() if self.hosts <= self._ready.keys() else Routed()
            case StoreUp(port):
                told = self._tell_store(index, port)
                if self._ready.keys() >= self.hosts:  # the store's host was lost
                    address = self._agents[index].address
                    told.up.append(Parcel(StoreDied("was on a host that is lost", port, address)))
                return told
            case StoreDied(_, port):
                return self._add(Routed(up=[parcel]), self._tell_store(index, port))
            case StartFailed(fault, text):
                if self._has_failed:
                    return Routed()
                self._has_failed = True
                return Routed(up=[Parcel(StartFailed(fault, self._name(index, text)))])
            case Respawned(infos):
                self._dead.difference_update(info.rank for info in infos)
                return self._note_respawn(index, verb)
            case RespawnFailed(ranks, text):
                return self._note_respawn(index, RespawnFailed(ranks, self._name(index, text)))
            case Died(rank):
                self._dead.add(rank)
            case AgentFault(text):
                return Routed(up=[Parcel(AgentFault(self._name(index, text)))])
            case HostReport():
                self._reports.note(index, verb)
                return Routed(up=self._joined_reports())
            case Stopped(reason):
                self._ended.add(index)
                return self.lose(index, reason)
            case Detached() if self._is_leaving:
                self.hosts.discard(index)
                return Routed(up=[] if self.hosts else [parcel])
        return Routed(up=[parcel])

    def lose(self, index: int, reason: str) -> Routed:
        """Handle the end or loss of a host's agent, and with it of the host's ranks."""
        if index not in self.hosts:
            return Routed()
        self.hosts.discard(index)
        self._reports.note_lost(index, reason)
        if self._is_leaving:
            return Routed(up=[] if self.hosts else [Parcel(Detached(reason))])
        if not self.hosts or (self._has_failed and not self.is_stopping):
            others = self._to(self.hosts, Parcel(Stop()))  # these have not failed
            self.hosts.clear()
            return Routed([Parcel(Stopped(reason))], others.down)
        if self.is_stopping:
            return Routed()
        agent = self._agents[index]
        living = [rank for rank in agent.ranks if rank not in self._dead]
        self._dead.update(living)
        routed = Routed(up=[Parcel(HostLost(agent.name, tuple(living), reason))] if living else [])
        if not self._ready.keys() >= self.hosts:
            text = f"{agent.name} is lost while the mesh starts: {reason}"
            self._has_failed = True
            routed.up = [Parcel(StartFailed("host", text))]
        elif index == self._store[0]:
            routed.down.append(self._make_store())
        routed.up += self._joined_reports()
        routed.up += self._respawned()
        return routed

    # ---- hosts that return, or are replaced

    @property
    def lost(self) -> tuple[int, ...]:
        """Indices of the hosts that count as lost: their agents have ended, or had no connection
        for too long.
        """
        return tuple(sorted(set(range(len(self._agents))) - self.hosts))

    @property
    def returned(self) -> frozenset[int]:
        """Indices of the lost hosts whose agents can be reached again and have reported their
        ranks.
        """
        ready = (index for index, (_, ready) in self._returned.items() if ready is not None)
        return frozenset(ready)

    def _note_return(self, index: int, verb: Any) -> Routed:
        """Record a message of a lost host's agent, which can be reached again."""
        if isinstance(verb, Welcome):
            self._returned[index] = verb, None
        elif isinstance(verb, MeshReady) and index in self._returned:
            self._returned[index] = self._returned[index][0], verb
            text = f"{self.describe(index)} is heard again: `%dist_heal` takes its ranks back"
            return Routed(up=[Parcel(AgentFault(text))])
        elif isinstance(verb, Stopped):
            self._ended.add(index)
            self._returned.pop(index, None)
        return Routed()

    def take_back(self, index: int) -> Routed:
        """Take a lost host that can be reached again back into the mesh: its ranks keep their
        state, and the runs that they still execute, which have ended for the controller, are
        interrupted.
        """
        welcome, ready = self._returned.pop(index)
        assert ready is not None
        self.hosts.add(index)
        self._ready[index] = ready
        living = tuple(info for info in ready.ranks if info.phase != "dead")
        self._dead.difference_update(info.rank for info in living)
        routed = Routed(up=[Parcel(Returned(living))])
        routed.down += self._store_orders([index], ready.incarnation)
        for info in welcome.runs:
            ranks = tuple(rank for rank in info.ranks if rank not in self._dead)
            stop = control(ranks, Interrupt(info.run))
            routed.down.append((index, stop.parcel))
        return routed

    def replace(self, index: int, agent: Host) -> Routed:
        """Replace the agent of a lost host by a new agent, whose ranks are dead until they are
        forked.
        """
        self._agents[index] = agent
        self._ended.discard(index)
        self._returned.pop(index, None)
        self.hosts.add(index)
        self.joining.add(index)
        self._ready.setdefault(index, MeshReady(()))
        incarnation = max(ready.incarnation for ready in self._ready.values())
        return Routed(down=self._store_orders([index], incarnation))

    # ---- joined

    def _store_orders(
        self, hosts: Iterable[int], incarnation: int
    ) -> list[tuple[int, Parcel[Any]]]:
        """Return orders by which these hosts use the c10d store at its present address; [] without
        a store.
        """
        host, port = self._store
        order = Parcel(UseStore(self._agents[host].address, port, incarnation))
        return [(index, order) for index in sorted(hosts)] if port else []

    def _tell_store(self, index: int, port: int) -> Routed:
        if not port:
            return Routed()
        self._store = index, port
        incarnation = max((ready.incarnation for ready in self._ready.values()), default=0)
        return Routed(down=self._store_orders(self.hosts - {index}, incarnation))

    def _make_store(self) -> tuple[int, Parcel[Any]]:
        """Choose a host that can be reached, and return the order to start a new c10d store on it,
        as the host of the last store is lost.
        """
        heard = self.hosts - self._reports.silent
        self._store = min(heard or self.hosts), 0  # until it reports the port
        return self._store[0], Parcel(MakeStore())

    def _all_ready(self) -> Routed:
        ranks = [info for index in sorted(self._ready) for info in self._ready[index].ranks]
        # Groups use this port, of the store's owner, after the store was replaced.
        port = self._ready[min(self._ready)].store_port
        gone = list(self._reports.lost_ranks(self._agents, self.lost))
        self._dead.update(info.rank for info in gone)
        ranks += gone
        ready = MeshReady(tuple(sorted(ranks, key=lambda info: info.rank)), port)
        routed = Routed(up=[Parcel(ready)])
        if self.lost and self._store[0] not in self.hosts:
            routed.down.append(self._make_store())
        return routed

    def _find_store(self, ready: MeshReady) -> None:
        """Record which host has the c10d store, from the report of a host whose ranks use it."""
        for index, agent in enumerate(self._agents):
            if agent.address == ready.store_address:
                self._store = index, ready.store_port
                return

    def _joined_reports(self) -> list[Parcel[Any]]:
        return [Parcel(report) for report in self._reports.take(self._agents, self.hosts)]

    def note_heard(self, index: int, is_heard: bool) -> Routed:
        """Record whether a host can be reached; requests do not wait for a host that cannot."""
        if is_heard:
            self._reports.silent.discard(index)
            return Routed()
        self._reports.silent.add(index)
        return Routed(up=self._joined_reports())

    def _add(self, routed: Routed, more: Routed) -> Routed:
        routed.up += more.up
        routed.down += more.down
        return routed

    def _name(self, index: int, text: str) -> str:
        """Prefix a text of an agent with its host's name, unless the mesh runs on this machine
        alone.
        """
        host = self._agents[index].name
        return f"on {host}: {text}" if host else text

    def describe(self, index: int) -> str:
        """Return a host's name and ranks, as text."""
        agent = self._agents[index]
        ranks = describe_ranks(agent.ranks) if agent.ranks else "no ranks yet"
        return f"{agent.name} ({ranks})"


class Gathering(Generic[_T]):
    """The answers of several hosts to numbered requests."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[set[int], dict[int, _T]]] = {}

    def begin(self, number: int, hosts: Iterable[int]) -> None:
        """Register a numbered request, which these hosts have to answer."""
        self._open[number] = set(hosts), {}

    def add(self, number: int, host: int, answer: _T) -> bool:
        """Record a host's answer to a request; return whether the request is still open."""
        if number in self._open:
            self._open[number][1][host] = answer
        return number in self._open

    def awaited(self, number: int) -> list[int]:
        """Return the hosts that have not answered a request."""
        hosts, answers = self._open.get(number, (set(), {}))
        return sorted(hosts - answers.keys())

    def take(self, hosts: Collection[int]) -> Iterator[tuple[int, dict[int, _T]]]:
        """Close each request that no host in `hosts` still has to answer, and yield its number and
        answers.
        """
        for number, (asked, answers) in list(self._open.items()):
            if asked & set(hosts) <= answers.keys():
                del self._open[number]
                yield number, answers


class HostReports:
    """The open requests for hosts' reports, and the last report of each host on its ranks.

    Attributes:
        silent: hosts that are out of reach at the moment, whose answers are not awaited.
        why_lost: index of a lost host -> why it is lost.
    """

    def __init__(self) -> None:
        self._questions: Gathering[HostReport] = Gathering()
        self.begin = self._questions.begin
        self._last: dict[int, tuple[RankInfo, ...]] = {}
        self.why_lost: dict[int, str] = {}
        self.silent: set[int] = set()

    def note(self, index: int, report: HostReport) -> None:
        """Record a host's report: its answer to a request, and the latest state of its ranks."""
        self._questions.add(report.request, index, report)
        self.note_ranks(index, report.ranks)

    def note_ranks(self, index: int, ranks: Sequence[RankInfo]) -> None:
        """Record the latest state of a host's ranks, which the host has reported with or without a
        request.
        """
        self._last[index] = tuple(ranks)

    def note_lost(self, index: int, why: str) -> None:
        """Record that a host is lost, and why."""
        self.silent.discard(index)
        self.why_lost[index] = why

    def forget(self, index: int) -> None:
        """Forget the reports of a host that leaves the mesh, as another host may get its index
        later.
        """
        self.silent.discard(index)
        self._last.pop(index, None)
        self.why_lost.pop(index, None)

    def take(self, agents: Sequence[Host], hosts: Collection[int]) -> Iterator[HostReport]:
        """Yield, for each request that waits for no more answers, the hosts' reports joined into
        one.

        Args:
            agents: the agents, one a host.
            hosts: indices of the hosts that are not lost.
        """
        for request, answers in self._questions.take(set(hosts) - self.silent):
            others = self._not_heard([i for i in hosts if i not in answers])
            lost = [i for i in range(len(agents)) if i not in hosts]
            ranks = (*others, *self.lost_ranks(agents, lost))
            yield join_reports(request, answers.values(), ranks)

    def lost_ranks(self, agents: Sequence[Host], lost: Iterable[int]) -> Iterator[RankInfo]:
        """Yield the state of each rank of the lost hosts, as a dead rank."""
        for index in lost:
            host, why = agents[index].name, self.why_lost.get(index, "")
            ending = f"was on {host}, which is lost" + (f": {why}" if why else "")
            for rank in agents[index].ranks:
                yield RankInfo(rank, 0, host, "dead", ending=ending)

    def _not_heard(self, hosts: Iterable[int]) -> Iterator[RankInfo]:
        for index in hosts:
            for info in self._last.get(index, ()):
                yield msgspec.structs.replace(info, is_heard=False)


def join_reports(
    request: int, reports: Iterable[HostReport], others: Iterable[RankInfo] = ()
) -> HostReport:
    """Join the reports of several hosts for one request into one, with the ranks in order.

    Args:
        request: number of the request.
        reports: the reports.
        others: ranks of hosts that have not answered.
    """
    reports = list(reports)
    infos = [*(info for report in reports for info in report.ranks), *others]
    ranks = sorted(infos, key=lambda info: info.rank)
    at_s = max((report.at_s for report in reports), default=0.0)
    preloaded = "; ".join(dict.fromkeys(each.preloaded for each in reports if each.preloaded))
    return HostReport(request, tuple(ranks), at_s, preloaded)
