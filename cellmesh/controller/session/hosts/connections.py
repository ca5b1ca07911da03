"""The controller's connections to a mesh's agents, one on each of its hosts."""

from __future__ import annotations

import math
import os
import select
import time as clock
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import HostError
from ....wire import transport
from ....wire.attach import Refused, SetAgents, Welcome
from ....wire.codec import Parcel
from ....wire.hosts import SILENT_S, ClockReading, FilesAnswer, Host, ReadClock
from ....wire.messages import AgentFault, Ranked, Relay, Resize, Stop, Stopped
from ....wire.process import FILES_A_HOST, make_room
from ....wire.segment_pool import SegmentPool
from ....wire.ticket import Ticket
from ...core.clocks import ClockComparison, ClockOffset
from ...news import Reply
from ..connection import Connection, Message
from .fan import Fan, Gathering, Routed

if TYPE_CHECKING:
    from ...code_files.sync import Answers, Make


class Connections:
    """The controller's connections to a mesh's agents; created on any thread, used on the link's
    thread.

    A host without a connection is reported to the user; after the ticket's `host_lease_s` without
    one it counts as lost, with its ranks. An agent that was replaced is ended as soon as it is
    reached again; its messages are ignored.

    Args:
        ticket: ticket of the mesh, with the agents' addresses.
        steal: whether to take the mesh from a controller that holds it.
        lost: indices of the hosts that are lost already.
        pool, visits: see `Connection`.
    """

    def __init__(
        self,
        ticket: Ticket,
        steal: bool,
        lost: Collection[int] = (),
        pool: SegmentPool | None = None,
        visits: bool = False,
    ) -> None:
        self._ticket, self._steal, self._pool, self._visits = ticket, steal, pool, visits
        self._lease_s = ticket.host_lease_s
        self._fan = Fan(ticket.all_agents, lost)
        self._of: dict[int, Connection] = {}
        self._each: list[Connection] = []  # of `_all` and `_replaced`
        self._num_invited = 0  # the last of `_all`, on hosts that have no ranks yet
        self._replaced: dict[Connection, float] = {}  # when to give up reaching them
        self._up: list[Parcel[Any]] = []
        self._reported: set[int] = set()
        self._clocks = [ClockComparison() for _ in ticket.all_agents]
        self._files: Gathering[FilesAnswer] = Gathering()
        self._replies: dict[int, Reply[Answers]] = {}  # by the number of their request
        # A late answer to an earlier controller must not be taken for one to this one.
        self._last_request = int.from_bytes(os.urandom(5))
        self._all: list[Connection] = []

    def open(self) -> None:
        """Connect to all agents; to be called on the link's thread, which uses the connections.

        Raises:
            HostError: this process cannot open more sockets.
        """
        agents = self._ticket.all_agents
        make_room(FILES_A_HOST * len(self._ticket.agents))
        # Connections are added and removed, but the link polls the descriptors of the beginning.
        self._poll = select.epoll()
        self._context = transport.make_context(len(agents))
        try:
            self._all += [self._connect_to(agent, self._steal) for agent in agents]
            for index in self._fan.lost:
                self._all[index].renew()
            for agent in self._ticket.replaced:
                self._dismiss(self._connect_to(agent, True))
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors to poll for messages: those of the only connection, to this
        machine's agent, or one epoll descriptor for all hosts.

        They report arrivals only while nothing is readable (`is_readable`).
        """
        return (self._poll.fileno(),) if self._ticket.agents else tuple(self._of)

    def note_ready(self, number: int) -> None:
        """Record that poll has reported this file descriptor, one of `descriptors`, as readable."""
        if number in self._of:
            self._of[number].note_ready(number)
            return
        for ready, _ in self._poll.poll(0):
            self._of[ready].note_ready(ready)

    def is_readable(self) -> bool:
        """Return whether a message of any agent can be read; to be called after each send."""
        if self._up:
            return True
        for each in self._each:  # noqa: SIM110 - on the path of each call
            if each.is_readable():
                return True
        return False

    def send(self, parcels: Message) -> None:
        """Send each agent the messages that concern it, now or once its connection is open."""
        by_host: dict[int, list[Parcel[Any]]] = {}
        is_only = len(self._all) == 1 and bool(self._fan.hosts)
        for parcel in parcels:
            if is_only and type(parcel.verb) is Relay:  # on the path of each call
                by_host.setdefault(0, []).append(parcel)
                continue
            routed = self._fan.split(parcel)
            self._up += routed.up
            for index, part in routed.down:
                by_host.setdefault(index, []).append(part)
            if isinstance(parcel.verb, Resize):
                self._num_invited = 0
                self._keep(len(parcel.verb.layout))
        for index, parts in by_host.items():
            self._all[index].send(parts)

    def hear(self, now: float) -> Iterator[Parcel[Any]]:
        """Yield the messages that have arrived from all agents, without waiting.

        Raises:
            ProtocolError: a message cannot be decoded.
        """
        waiting, self._up, fan = self._up, [], self._fan
        yield from waiting
        for index, connection in enumerate(self._all):
            if not connection.has_news():
                continue
            for parcel in connection.hear(now):
                if (
                    type(parcel.verb) is Ranked
                    and fan.is_welcome
                    and index in fan.hosts - fan.joining
                ):
                    yield parcel
                    continue
                if isinstance(parcel.verb, ClockReading):
                    verb = parcel.verb
                    self._clocks[index].add(verb.sent_s, verb.host_s, clock.monotonic())
                    continue
                if isinstance(parcel.verb, FilesAnswer):
                    self._files.add(parcel.verb.request, index, parcel.verb)
                    continue
                if isinstance(parcel.verb, Welcome) and connection.is_remote:
                    self._clocks[index].begin(now)
                if isinstance(parcel.verb, Stopped):
                    parcel = Parcel(Stopped(self._explain(index, parcel.verb.reason)))
                yield from self._route(self._fan.join(index, parcel))
        for connection in list(self._replaced):
            self._end_replaced(connection, now)
        is_missing = bool(self._reported)
        for connection in self._all:
            is_missing |= connection.lost_at is not None
        if is_missing:
            yield from self._watch(now)
        if self._replies:
            self._give_replies()

    def _watch(self, now: float) -> Iterator[Parcel[Any]]:
        """Yield reports for users on hosts whose connection is lost or made again; count a host as
        lost once it has been without a connection for `host_lease_s`.
        """
        for index in sorted(self._fan.hosts):
            lost_at = self._all[index].lost_at
            if lost_at is None:
                if index in self._reported:
                    self._reported.discard(index)
                    self._fan.note_heard(index, True)
                    yield Parcel(AgentFault(f"{self._fan.describe(index)} is heard again"))
                continue
            since = clock.strftime("%H:%M:%S", clock.localtime(clock.time() - now + lost_at))
            if now >= lost_at + self._lease_s:
                why = self._explain(index, f"without a connection since {since}")
                yield from self._route(self._fan.lose(index, why))
                self._reported.discard(index)
                self._all[index].renew()
            elif index not in self._reported:
                self._reported.add(index)
                yield from self._route(self._fan.note_heard(index, False))
                yield Parcel(
                    AgentFault(
                        f"{self._fan.describe(index)} is not heard: without a connection since "
                        f"{since}, and silent for up to {SILENT_S:.0f} s before. Its ranks count "
                        f"as lost after {self._lease_s:.0f} s (--host-lease)"
                    )
                )

    def ask_files(self, make: Make, reply: Reply[Answers]) -> None:
        """Send agents requests about the user's module files, and set `reply` to their answers;
        called on the link's thread.
        """
        self._last_request += 1
        messages = make(self._last_request, frozenset(self._fan.hosts))
        self._files.begin(self._last_request, messages)
        self._replies[self._last_request] = reply
        for index, parcels in messages.items():
            for parcel in parcels:
                self._all[index].send([parcel])
        self._give_replies()

    def _give_replies(self) -> None:
        for request, answers in self._files.take(self._fan.hosts):
            self._replies.pop(request).give(answers)

    def _explain(self, index: int, reason: str) -> str:
        """Return why a host's agent has ended, with the message of the job scheduler, if there is
        one.
        """
        from ..launch.commands import describe_job_end

        said = describe_job_end(self._ticket, self._fan.name_of(index))
        return f"{reason}; {said}" if said and not self._fan.is_stopping else reason

    def unended(self, replaced: Sequence[Host]) -> list[Host]:
        """Return the agents that have not reported that they have ended; callable on any thread.

        Args:
            replaced: agents that others have replaced, which may not have been reached since.
        """
        return [*self._fan.unended, *(replaced if self._replaced else ())]

    def name_of(self, index: int) -> str:
        """Return the name of the host with this index."""
        return self._fan.name_of(index)

    def unanswered(self, reply: Reply[Answers]) -> list[str]:
        """Return the names of the hosts that have not answered a request of `ask_files`; callable
        on any thread.
        """
        requests = [number for number, each in list(self._replies.items()) if each is reply]
        return [self.name_of(index) for each in requests for index in self._files.awaited(each)]

    def check_all_heard(self) -> None:
        """Raise an error unless every host can be reached, as a restart requires; callable on any
        thread.

        Raises:
            HostError: a host is lost, or out of reach at the moment.
        """
        missing = sorted({*self.lost, *self._reported})
        if names := ", ".join(map(self.name_of, missing)):
            raise HostError(
                f"lost or not heard: {names}. A restart needs all hosts, and has changed nothing. "
                "First `%dist_heal`, which takes a host back or starts it again, or `%dist_resize "
                "N` to go on without"
            )

    @property
    def lost(self) -> tuple[int, ...]:
        """Indices of the hosts that count as lost: their agents have ended, or had no connection
        for too long.
        """
        return self._fan.lost

    @property
    def returned(self) -> frozenset[int]:
        """Indices of the lost hosts that can be reached again."""
        return self._fan.returned

    def take_back(self, index: int) -> bool:
        """Take a lost host back into the mesh if it can be reached again, and return whether it
        can; called on the link's thread.
        """
        if index not in self._fan.returned:
            return False
        self._up += list(self._route(self._fan.take_back(index)))
        return True

    def replace(self, index: int, ticket: Ticket, is_gone: bool) -> None:
        """Replace the agent of a lost host by a new agent; called on the link's thread.

        Args:
            index: index of the lost host.
            ticket: ticket of the mesh, with the new agent.
            is_gone: whether the lost agent is known to have ended.
        """
        agent = ticket.agents[index]
        old, self._all[index] = self._all[index], self._connect_to(agent, True)
        if is_gone:
            self._drop(old)
        else:
            self._dismiss(old)
        self._clocks[index] = ClockComparison()
        self._up += list(self._route(self._fan.replace(index, agent)))
        self.tell_agents(ticket)

    def tell_agents(self, ticket: Ticket) -> None:
        """Send the addresses of the mesh's present agents to all agents; called on the link's
        thread.
        """
        order = SetAgents(ticket.agents, ticket.agents_revision, ticket.num_resizes)
        self.send([Parcel(order)])

    def invite(self, agents: Sequence[Host]) -> None:
        """Add hosts, which get ranks when the mesh is resized; called on the link's thread."""
        for agent in agents:
            self._all.append(self._connect_to(agent, True))
            self._clocks.append(ClockComparison())
            self._up += list(self._route(self._fan.add(agent)))
        self._num_invited = len(agents)

    def check_invited(self) -> None:
        """Raise an error unless the hosts that `invite` has added can be used; called on the link's
        thread.

        Raises:
            HostError: the agent of an invited host has ended, or cannot be reached.
        """
        for index in self.lost:
            if index >= len(self._all) - self._num_invited:
                why = self._fan.why_lost(index)
                raise HostError(f"{self.name_of(index)} cannot be used: {why}")

    def turn_away(self) -> None:
        """Remove the hosts that `invite` has added from the mesh, and end their agents; called on
        the link's thread.
        """
        num_kept, self._num_invited = len(self._all) - self._num_invited, 0
        self._fan.keep(num_kept)
        self._keep(num_kept)

    def _keep(self, num_hosts: int) -> None:
        """Keep the first `num_hosts` hosts, and end the agents of all other hosts."""
        while len(self._all) > num_hosts:
            self._dismiss(self._all.pop())
            self._clocks.pop()
            self._reported.discard(len(self._all))

    def clocks(self, ranks: Iterable[int]) -> dict[int, ClockOffset]:
        """Return the offset of the clock of each rank's host from the notebook's clock; callable on
        any thread.
        """
        found = {}
        for rank in ranks:
            index = self._fan.host_of(rank)
            if offset := self._clocks[index].offset(self._fan.name_of(index)):
                found[rank] = offset
        return found

    def _connect_to(self, agent: Host, steal: bool) -> Connection:
        # An agent of this machine listens on a socket file, where the kernel identifies its peers.
        keys = (self._ticket.curve_secret, agent.public_key) if agent.public_key else None
        connection = Connection(
            agent.reached_at,
            self._ticket.key,
            steal,
            keys,
            self._context,
            self._pool,
            self._visits,
        )
        self._each.append(connection)
        for number in connection.descriptors():
            self._of[number] = connection
            self._poll.register(number, select.EPOLLIN)
        return connection

    def _dismiss(self, connection: Connection) -> None:
        """Order a replaced agent to end once it can be reached; keep its connection until it has
        ended or its lease is over.
        """
        connection.send([Parcel(Stop())])
        self._replaced[connection] = (
            clock.monotonic() + self._ticket.lease_s + 2 * self._ticket.host_lease_s
        )

    def _end_replaced(self, connection: Connection, now: float) -> None:
        is_over = now >= self._replaced[connection]
        for parcel in connection.hear(now):
            is_over |= isinstance(parcel.verb, Stopped | Refused)
        if is_over:
            del self._replaced[connection]
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._each.remove(connection)
        for number in connection.descriptors():
            self._poll.unregister(number)
            del self._of[number]
        connection.close()

    def _route(self, routed: Routed) -> Iterator[Parcel[Any]]:
        for index, parcel in routed.down:
            self._all[index].send([parcel])
        yield from routed.up

    def tick(self, now: float) -> None:
        """Let each connection act on its deadline, and request the readings of hosts' clocks that
        are due.
        """
        for connection in self._each:
            connection.tick(now)
        for index in self._fan.hosts:
            if now >= self._clocks[index].due_s:
                self._clocks[index].note_sent(now)
                if self._all[index].lost_at is None:
                    self._all[index].send([Parcel(ReadClock(clock.monotonic()))])

    def deadline(self) -> float | None:
        """Return the latest time at which `tick` and `hear` must be called; None without a
        deadline.
        """
        due = min(self._replaced.values(), default=math.inf)
        for connection in self._each:
            at = connection.deadline()
            if at is not None and at < due:
                due = at
        for index in self._fan.hosts:
            lost_at = self._all[index].lost_at
            if lost_at is not None:  # at once, if it is not reported yet
                due = min(due, lost_at + (self._lease_s if index in self._reported else 0.0))
            due = min(due, self._clocks[index].due_s)
        return None if due == math.inf else due

    def close(self) -> None:
        """Close all connections; the last messages may still be sent for a moment."""
        for reply in self._replies.values():
            reply.give(None)
        self._replies.clear()
        for connection in self._each:
            connection.close()
        self._context.term()  # waits for the last messages of all
        self._poll.close()
