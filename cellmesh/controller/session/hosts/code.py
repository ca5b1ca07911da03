"""Keeps the user's modules the same on the hosts of a session's mesh, through its link."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from ....errors import HostError
from ....wire.modules import loaded
from ....wire.ticket import Ticket
from ...code_files.sync import CodeSync
from ...core.core import Core, Effect
from ..link import Link, warn
from .answers import Answers, Make
from .connections import Connections


def sync_through(hosts: Connections, link: Link, ticket: Ticket) -> CodeSync:
    """Return a `CodeSync` that sends the user's modules to a mesh's hosts through its session.

    Args:
        hosts: the connections to the agents.
        link: uses them, in its loop.
        ticket: of the mesh.
    """

    def ask(make: Make, timeout_s: float | None) -> Answers:
        link.check_may_wait()
        future: Future[Answers] = Future()

        def begin(core: Core, now: float) -> Sequence[Effect]:
            hosts.ask_files(make, future)
            return ()

        link.post(begin)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            silent = ",".join(hosts.unanswered(future))
            raise HostError(
                f"{silent}: no answer about the files beside the notebook for {timeout_s:.0f} s. "
                "`%dist_status` says whether they are heard"
            ) from None

    return CodeSync(ticket.roots, ask, hosts.name_of, lambda: loaded.num_loads, warn)
