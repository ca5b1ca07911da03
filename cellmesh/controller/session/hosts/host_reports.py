"""The agents' reports on their ranks' processes, joined into one for all hosts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from ....wire.hosts import AgentAddress
from ....wire.status import HostReport, RankInfo


class HostReports:
    """The questions for reports that agents have not all answered, and what each host has said
    last.

    Attributes:
        silent: the hosts that are not heard at the moment, whose answers nobody waits for.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, HostReport]] = {}
        self._last: dict[int, tuple[RankInfo, ...]] = {}
        self._why_lost: dict[int, str] = {}
        self.silent: set[int] = set()

    def begin(self, request: int) -> None:
        """Note a question that goes to all hosts."""
        self._open[request] = {}

    def note(self, index: int, report: HostReport) -> None:
        """Note a host's answer."""
        if report.request in self._open:
            self._open[report.request][index] = report
        self.note_ranks(index, report.ranks)

    def note_ranks(self, index: int, ranks: Sequence[RankInfo]) -> None:
        """Note what a host says of its ranks without a question."""
        self._last[index] = tuple(ranks)

    def note_lost(self, index: int, why: str) -> None:
        """Note that a host is lost, and how."""
        self.silent.discard(index)
        self._why_lost[index] = why

    def forget(self, index: int) -> None:
        """Forget a host that leaves the mesh, as another host may have its place later."""
        self.silent.discard(index)
        self._last.pop(index, None)
        self._why_lost.pop(index, None)

    def take(self, agents: Sequence[AgentAddress], hosts: Collection[int]) -> Iterator[HostReport]:
        """Yield the joined answers to questions that no host has still to answer.

        Args:
            agents: one a host.
            hosts: those of them that are not lost.
        """
        for request, answers in list(self._open.items()):
            if set(hosts) - self.silent <= answers.keys():
                del self._open[request]
                others = self._not_heard([i for i in hosts if i not in answers])
                lost = [i for i in range(len(agents)) if i not in hosts]
                ranks = (*others, *self.lost_ranks(agents, lost))
                yield join_reports(request, answers.values(), ranks)

    def lost_ranks(self, agents: Sequence[AgentAddress], lost: Iterable[int]) -> Iterator[RankInfo]:
        """Yield the ranks of lost hosts, which count as dead."""
        for index in lost:
            host, why = agents[index].host, self._why_lost.get(index, "")
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
    """Return the hosts' answers to one question as one, with the ranks in their order.

    Args:
        request: the question's number.
        reports: the answers.
        others: the ranks of hosts that have not answered.
    """
    reports = list(reports)
    infos = [*(info for report in reports for info in report.ranks), *others]
    ranks = sorted(infos, key=lambda info: info.rank)
    return HostReport(request, tuple(ranks), max((report.at_s for report in reports), default=0.0))
