"""The standing of a mesh, as its agents know it."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest

from cellmesh.controller.session.standing import (
    HostStanding,
    _find_ended,
    summarize,
    with_newest_agents,
)
from cellmesh.wire.attach import SetAgents, Standing
from cellmesh.wire.hosts import Host
from cellmesh.wire.ticket import Holder

from ....support.tickets import make_ticket


def agent_at(port: int | str) -> Host:
    return Host(f"at {port}", f"tcp://127.0.0.1:{port}", "", 0, 1)


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
        "from cellmesh.controller.session.standing import _find_ended\n"
        "from cellmesh.wire.hosts import Host\n"
        f"agent = Host('a', 'tcp://127.0.0.1:{closed_port()}', '', 0, 1)\n"
        "atexit.register(lambda: print({each.name for each in _find_ended([agent], 10.0)}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("{'a'}\n", "")


OLD = Host("a", "tcp://10.0.0.1:1", "key-a", 0, 2), Host("b", "b:2", "key-b", 2, 2)
NEW = OLD[0], Host("c", "tcp://10.0.0.3:3", "key-c", 2, 2)
LARGER = *NEW, Host("d", "tcp://10.0.0.4:4", "key-d", 4, 2)

TICKET = make_ticket(
    name="far", num_ranks=4, agents=OLD, agents_revision=1, curve_secret="secret of controllers"
)


def holder(**fields: object) -> Holder:
    known = Holder(controller_pid=7, is_attached=False, since=10.0)
    return msgspec.structs.replace(known, **fields)


def standing(agents: SetAgents | None, **fields: object) -> HostStanding:
    return HostStanding(OLD[0], Standing(1, holder(**fields), agents))


@pytest.mark.parametrize(
    ("said", "agents", "num_ranks"),
    [
        ([None, None], OLD, 4),
        ([None, SetAgents(NEW, 2)], NEW, 4),
        ([SetAgents(LARGER, 3, 1), SetAgents(NEW, 2)], LARGER, 6),
        ([SetAgents(NEW, 1)], OLD, 4),
    ],
)
def test_agents_are_those_of_the_agent_that_knows_best(
    said: list[SetAgents | None], agents: tuple[Host, ...], num_ranks: int
) -> None:
    silent = HostStanding(OLD[1], None)
    found = with_newest_agents(TICKET, [*map(standing, said), silent])
    assert (found.agents, found.num_ranks) == (agents, num_ranks)


def test_controller_of_a_mesh_is_whom_any_agent_has_attached() -> None:
    left = standing(None, since=20.0, num_refused=2, refused_at=5.0)
    held = standing(None, controller_pid=8, is_attached=True, num_refused=1, refused_at=9.0)
    joined = summarize([left, held], holder(num_refused=4, refused_at=1.0))
    assert joined == holder(controller_pid=8, is_attached=True, num_refused=7, refused_at=9.0)
    assert summarize([HostStanding(OLD[0], None)]) is None


def test_structs_with_keys_do_not_print_them() -> None:
    assert "secret" not in repr(TICKET)
