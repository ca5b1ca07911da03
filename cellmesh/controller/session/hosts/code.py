"""Keeps the user's modules the same on the hosts of a session's mesh, through its link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ....errors import HostError
from ....wire.modules import loaded
from ....wire.ticket import Ticket
from ...code_files.sync import CodeSync
from ...core.core import Core, Effect
from ..link import Link, warn
from .answers import Answers, Make
from .connections import HostConnections


def sync_through(
    connections: Callable[[], HostConnections | None], link: Link, ticket: Ticket
) -> CodeSync:
    """Return a `CodeSync` that sends the user's modules to a mesh's hosts through its session.

    Args:
        connections: returns those to the agents, once the link has made them.
        link: uses them, in its loop.
        ticket: of the mesh.
    """

    def ask(make: Make, timeout_s: float | None) -> Answers:
        link.check_may_wait()
        future: Future[Answers] = Future()

        def begin(core: Core, now: float) -> Sequence[Effect]:
            hosts = connections()
            assert hosts is not None
            hosts.ask_files(make, future)
            return ()

        link.post(begin)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            hosts = connections()
            silent = ",".join(hosts.unanswered(future) if hosts is not None else ())
            raise HostError(
                f"{silent}: no answer about the files beside the notebook for {timeout_s:.0f} s. "
                "`%dist_status` says whether they are heard"
            ) from None

    def name_host(index: int) -> str:
        hosts = connections()
        return hosts.name_of(index) if hosts is not None else ""

    return CodeSync(ticket.roots, ask, name_host, lambda: loaded.num_loads, warn)
