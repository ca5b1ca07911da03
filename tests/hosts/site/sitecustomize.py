"""Python of a host in a network namespace: see `tests.hosts.lender`."""

import sys

if sys.orig_argv[1:4] == ["-m", "cellmesh", "agent"]:
    from cellmesh.workers.agent import on_host
    from tests.hosts.lender import HostsLender
    from tests.support.lent_agent import Subprocess

    on_host.subprocess = Subprocess(HostsLender)
