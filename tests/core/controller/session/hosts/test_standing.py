"""Whether the agents of a mesh on many hosts have ended."""

from __future__ import annotations

import socket
import subprocess
import sys

from cellmesh.controller.session.hosts.standing import _find_ended
from cellmesh.wire.hosts import AgentAddress


def agent_at(port: int | str) -> AgentAddress:
    return AgentAddress(f"at {port}", f"tcp://127.0.0.1:{port}", "", 0, 1)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_agents_have_ended_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]
        closed = [agent_at(closed_port()) for _ in range(70)]
        assert _find_ended([agent_at(open_port), *closed], 10.0) == set(closed)


def test_agents_are_asked_while_the_process_exits() -> None:
    script = (
        "import atexit\n"
        "from cellmesh.controller.session.hosts.standing import _find_ended\n"
        "from cellmesh.wire.hosts import AgentAddress\n"
        f"agent = AgentAddress('a', 'tcp://127.0.0.1:{closed_port()}', '', 0, 1)\n"
        "atexit.register(lambda: print({each.host for each in _find_ended([agent], 10.0)}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("{'a'}\n", "")
