"""Which living mesh a notebook is offered, what it is shown of the others, and what their agents
know of them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellmesh.controller.session import alike, living
from cellmesh.controller.session.alike import find_same, offer_left
from cellmesh.controller.session.attach import stop_mesh
from cellmesh.controller.session.living import (
    FoundMesh,
    choose,
    describe,
    end,
    end_left,
    find_waiting,
    forget_if_dead,
    left_meshes,
    look_at,
    processes_of,
)
from cellmesh.controller.session.standing import (
    HostStanding,
    _find_ended,
    describe_runs,
    summarize,
    with_newest_agents,
)
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire import marks
from cellmesh.wire.attach import RunInfo, SetAgents, Standing
from cellmesh.wire.curve import new_keys
from cellmesh.wire.host import started_ticks, this_place
from cellmesh.wire.hosts import Host
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import (
    Holder,
    make_directory,
    new_key,
    runtime_root,
    write_holder,
    write_ticket,
)
from tests.conftest import run_python

from ....support.tickets import address, make_ticket

OWN, OTHER, UNNAMED = "/home/a/own.ipynb", "/home/a/other.ipynb", "/run/kernel-1.json"


def mesh(name: str, held: bool = False, notebook: str = OWN, **fields: Any) -> FoundMesh:
    usual = {"cwd": os.getcwd(), "backend": "auto", "controller_pid": 1, "created_at": 100.0}
    ticket = make_ticket(name=name, directory=f"/run/{name}", notebook=notebook, **usual | fields)
    holder = Holder(controller_pid=77, is_attached=held, since=160.0, notebook=notebook)
    return FoundMesh(ticket, "running" if held else "detached", holder)


def this_notebook(monkeypatch: pytest.MonkeyPatch, name: str, *meshes: FoundMesh) -> None:
    """Let this process be that of a notebook, and these meshes live."""
    for module in (living, alike):
        monkeypatch.setattr(module, "own_notebook", lambda: name)
    monkeypatch.setattr(living, "find_living", lambda asks: list(meshes))


@pytest.mark.parametrize(
    ("meshes", "steal", "chosen"),
    [
        ([mesh("a", held=True)], False, "a"),  # the agent's refusal says the rest
        ([mesh("a", held=True), mesh("b")], False, "b"),
        ([mesh("a", held=True), mesh("b")], True, "a"),
        ([mesh("a"), mesh("b")], False, None),
        ([mesh("a"), mesh("b", notebook=OTHER)], False, "a"),
        ([mesh("a", held=True), mesh("b", held=True)], False, None),
        ([], False, None),
    ],
)
def test_an_attach_without_a_name_takes_the_only_free_mesh(
    meshes: list[FoundMesh], steal: bool, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, OWN)
    found = choose(meshes, steal)
    assert (found.name if found is not None else None) == chosen


def test_a_mesh_is_described_by_its_notebook_and_holder() -> None:
    lines = [
        describe(mesh("a", held=True), 400.0),
        describe(mesh("b", notebook=UNNAMED, cwd="/data", lease_s=1800.0), 400.0),
    ]
    assert lines == [
        f"a: 2 ranks, started 5 min ago in {OWN}, held by process 77",
        "b: 2 ranks, started 5 min ago in /data, held by nobody, and lives on for 26 min",
    ]


HERE = this_place()
REBOOTED = msgspec.structs.replace(HERE, boot="another")
CONTAINER = msgspec.structs.replace(HERE, pid_namespace="pid:[1]")
NOW, NO_PROCESS = time.time(), 2**30
OWN_PROCESS = {"agent_pid": os.getpid(), "agent_ticks": started_ticks(os.getpid())}


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        (OWN_PROCESS, "running"),
        ({"agent_pid": os.getpid(), "agent_ticks": 1}, "dead"),
        (OWN_PROCESS | {"place": REBOOTED}, "dead"),
        (OWN_PROCESS | {"place": REBOOTED, "created_at": NOW}, "elsewhere"),
        (OWN_PROCESS | {"place": CONTAINER}, "elsewhere"),
        (OWN_PROCESS | {"directory": "/moved/found"}, "elsewhere"),
        ({}, "starting"),
        ({"controller_pid": NO_PROCESS, "created_at": NOW}, "starting"),
        ({"controller_pid": NO_PROCESS}, "dead"),
        ({"controller_pid": NO_PROCESS, "curve_secret": Secret("s")}, "dead"),
        ({"agents": (address("a"),), "curve_secret": Secret("s")}, "unheard"),
    ],
)
def test_the_state_of_a_mesh_follows_from_its_ticket_and_processes(
    fields: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks.time, "time", lambda: NOW)
    ticket = make_ticket(**{"directory": "/nowhere/found"} | fields)
    assert look_at(ticket, Path("/nowhere"), asks=False).state == state


def test_a_folder_that_a_ticket_names_is_not_removed_unless_the_ticket_lies_in_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis").write_text("...")
    wrong = make_ticket(agent_pid=0, directory=str(tmp_path / "precious"))
    with pytest.raises(HostError, match="has other files") as caught:
        end(FoundMesh(wrong, "dead"))
    assert "rm -r" not in str(caught.value)
    assert (tmp_path / "precious/thesis").exists()


@pytest.mark.parametrize(
    ("notebook", "there", "is_left"),
    [
        (OWN, mesh("a"), True),
        (OWN, mesh("a", held=True), False),
        (OWN, mesh("a", notebook=OTHER), False),
        (OWN, mesh("a", notebook=UNNAMED), True),  # of this folder
        (OWN, mesh("a", notebook=UNNAMED, cwd="/data"), False),
        (UNNAMED, mesh("a", notebook="/run/kernel-2.json"), True),
        ("", mesh("a", notebook=""), True),
    ],
)
def test_a_notebook_has_left_its_own_meshes_and_those_of_its_folder(
    notebook: str, there: FoundMesh, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, notebook, there)
    assert left_meshes(asks=True) == ([there] if is_left else [])


@pytest.mark.parametrize(
    ("given", "there", "is_same"),
    [
        ({"num_ranks": 2}, mesh("a"), True),
        ({"num_ranks": 4}, mesh("a"), False),
        ({"num_ranks": 2}, mesh("a", notebook=OTHER), False),
        ({"mesh": "dp=1,tp=2"}, mesh("a"), False),
        ({"num_ranks": 2, "name": "b"}, mesh("a"), False),
    ],
)
def test_a_start_with_the_options_of_an_own_mesh_is_offered_that(
    given: dict[str, Any], there: FoundMesh, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, OWN)
    assert find_same(given, [there]) == ([there] if is_same else [])


def test_the_offer_names_each_mesh_and_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    this_notebook(monkeypatch, OWN)
    assert "--fresh` ends it" in str(offer_left([mesh("a")]))
    text = str(offer_left([mesh("a"), mesh("b")]))
    parts = ("a: 2 ranks, started", "b: 2 ranks, started")
    assert all(each in text for each in (*parts, "`%dist_attach b`", "--fresh` ends them"))


def test_a_mesh_on_many_hosts_that_were_not_asked_may_live_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this_notebook(monkeypatch, OWN)
    agents = (address("a"), address("b", 1))
    left = mesh("a", agents=agents, curve_secret=Secret("s"), controller_pid=2**30)
    unasked = FoundMesh(left.ticket, "unheard")
    assert unasked.is_free
    assert "held by nobody, if it lives" in describe(unasked, 400.0)


ORDERLY = "sleep 1000"
DEAF = "trap '' TERM; setsid sleep 1000 & until false; do sleep 0.01; done"


@pytest.mark.parametrize(("agent", "is_orderly"), [(ORDERLY, True), (DEAF, False)])
def test_an_end_leaves_no_process_and_no_directory(
    agent: str, is_orderly: bool, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "_PATIENCE_S", 20.0 if is_orderly else 0.2)
    directory = make_directory(runtime_root(), "ending")
    mark = "a-mark-of-a-test"
    environment = {**os.environ, marks.VARIABLE: marks.value_of(mark, 0)}
    with subprocess.Popen(["bash", "-c", agent], env=environment) as child:
        fields = {"agent_pid": child.pid, "agent_ticks": started_ticks(child.pid), "mark": mark}
        ticket = make_ticket(name="ending", directory=str(directory), **fields)
        write_ticket(ticket)
        num_processes = 1 if is_orderly else 2
        while len(processes_of(ticket)) < num_processes:
            pass
        assert processes_of(ticket)[0].pid == child.pid
        assert end(look_at(ticket, runtime_root())) == is_orderly
        assert processes_of(ticket) == []
        assert not marks.carriers(marks.value_of(mark))
    assert not directory.exists()


def test_a_mesh_whose_ports_are_closed_is_forgotten_for_another_of_its_name(
    runtime_dir: Path,
) -> None:
    agent = Host("a", f"tcp://127.0.0.1:{closed_port()}", new_keys().public, 0, 1)
    secrets: dict[str, Any] = {"key": new_key(), "curve_secret": new_keys().secret}
    directory = make_directory(runtime_root(), "closed")
    known = {"name": "closed", "directory": str(directory), "controller_pid": NO_PROCESS}
    ticket = make_ticket(agents=(agent,), **known, **secrets)
    write_ticket(ticket)
    forget_if_dead("closed", but=ticket.mark)  # its firewall may refuse connections
    assert directory.exists()
    forget_if_dead("closed")
    assert not directory.exists()


def test_a_mesh_that_is_held_is_not_ended_by_the_path_of_its_ticket(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "another-root", "held")
    with subprocess.Popen(["sleep", "1000"]) as agent:
        fields = {"agent_pid": agent.pid, "agent_ticks": started_ticks(agent.pid)}
        ticket = make_ticket(name="held", directory=str(directory), **fields)
        write_holder(ticket, Holder(controller_pid=77, is_attached=True, since=160.0))
        try:
            with pytest.raises(MeshUsageError, match="held is held by process 77"):
                stop_mesh(str(write_ticket(ticket)))
            assert agent.poll() is None
        finally:
            agent.kill()


def test_a_mesh_that_is_held_is_not_ended() -> None:
    with pytest.raises(MeshUsageError, match=r"a is held by process 77.*cellmesh stop a"):
        end_left(mesh("a", held=True))


def test_no_other_process_counts_as_a_zygote_that_waits(tmp_path: Path) -> None:
    assert find_waiting(tmp_path) == []


# ---- what the agents of a mesh know


def test_runs_are_named_with_their_ranks_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Holder(controller_pid=77, is_attached=True, since=160.0)
    on_a = Standing(1, held, runs=(RunInfo(5, (0, 1), "cell 5"),))
    on_b = Standing(1, held, runs=(RunInfo(5, (2, 3), "cell 5"), RunInfo(6, (2,), "")))
    asked = [HostStanding(address("a"), on_a), HostStanding(address("b", 1), on_b)]
    monkeypatch.setattr("cellmesh.controller.session.standing.ask_agents", lambda ticket: asked)
    assert describe_runs(make_ticket()) == "cell 5 on ranks 0-3, a call on rank 2"
    asked[:] = [HostStanding(address("a"), None)]
    assert describe_runs(make_ticket()) == "nothing"


def agent_at(port: int) -> Host:
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
    done = run_python("-c", script, check=False)
    assert (done.stdout, done.stderr) == ("{'a'}\n", "")


OLD = Host("a", "tcp://10.0.0.1:1", "key-a", 0, 2), Host("b", "b:2", "key-b", 2, 2)
NEW = OLD[0], Host("c", "tcp://10.0.0.3:3", "key-c", 2, 2)
LARGER = *NEW, Host("d", "tcp://10.0.0.4:4", "key-d", 4, 2)

TICKET = make_ticket(num_ranks=4, agents=OLD, agents_revision=1, curve_secret="secret")


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
