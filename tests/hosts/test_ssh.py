"""Hosts by ssh, or by another command (`ip netns exec` stands in for kubectl and docker); networks
that fail, and hosts that cannot run their part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import CellmeshError, HostError, MeshUsageError
from tests.conftest import check_nothing_left
from tests.faults.watching import wait_until

from .netns import Host, run

WAIT_S = 60.0
REDUCE = "x = torch.ones(1) * rank; dist.all_reduce(x)"


@pytest.fixture
def mesh(machines: list[Host], runtime_dir: Path) -> Iterator[cm.Mesh]:
    with cm.start(hosts="cm1:2,cm2:2", lease_s=60, host_lease_s=4) as mesh:
        mesh.cell("kept = rank + 5")
        yield mesh


def lost_ranks(mesh: cm.Mesh) -> set[int]:
    return mesh.rank_set.session.dead_ranks


def check_reduce(mesh: cm.Mesh, total: float = 6.0) -> None:
    mesh.cell(REDUCE)
    assert set(mesh.pull("float(x)").list) == {total}


PROFILE = "ssh -o BatchMode=yes {host} 'GLOO_SOCKET_IFNAME=lo {command}'"


@pytest.mark.parametrize("options", [{}, {"interface": "eth0", "launch": PROFILE}])
def test_ranks_run_on_their_hosts(
    options: dict[str, str], machines: list[Host], runtime_dir: Path
) -> None:
    """A chosen interface comes before that of a site's profile."""
    with cm.start(hosts="cm1:1,cm2:3", **options) as mesh:  # type: ignore[arg-type]
        names = mesh.run(lambda: (__import__("socket").gethostname(), os.environ["LOCAL_RANK"]))
        assert names.list == [("cm1", "0"), ("cm2", "0"), ("cm2", "1"), ("cm2", "2")]
        assert mesh.run(lambda: os.environ["LOCAL_WORLD_SIZE"]).list == ["1", "3", "3", "3"]
        assert mesh.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]).list == ["eth0"] * 4
        assert mesh.run(lambda: os.environ["MASTER_ADDR"]).list == [machines[0].address] * 4
        check_reduce(mesh)


def test_ranks_run_where_another_command_has_started_agents(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:2,cm2:2", launch="ip netns exec {host} {command}") as mesh:
        check_reduce(mesh)
        ticket = mesh.rank_set.session.ticket
        assert [agent.address for agent in ticket.agents] == [h.address for h in machines[:2]]
        for process in psutil.Process().children(recursive=True):
            words = " ".join([*process.cmdline(), *process.environ().values()])
            assert ticket.key not in words
            assert ticket.curve_secret not in words


def test_mesh_takes_the_name_of_one_whose_host_has_crashed(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1", name="far"):
        machines[0].kill(leaves_files=True)
    assert list(machines[0].directory.glob("run/cellmesh/far-h0"))
    with cm.start(hosts="cm1:1", name="far") as mesh:
        assert mesh.pull("rank").list == [0]


def test_host_behind_another_is_reached_by_proxy_jump(
    machines: list[Host], runtime_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No packet of the notebook's host gets through to cm2, but for those that cm1 passes on."""
    client = machines[0].directory.parent / "ssh_config"
    config = client.read_text()
    machines[1].close_to_notebook()
    try:
        client.write_text(f"Host cm2\n    ProxyJump cm1\n{config}")
        with cm.start(hosts="cm1:1,cm2:1") as mesh:
            assert "cm2 is reached through ssh's forwarding" in capfd.readouterr().err
            assert mesh.run(lambda: __import__("socket").gethostname()).list == ["cm1", "cm2"]
            check_reduce(mesh, 1.0)
    finally:
        client.write_text(config)


def test_connections_that_are_back_within_the_lease_cost_nothing(
    mesh: cm.Mesh, machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    """Of ssh, which has started the agents, and of the network in the middle of a cell."""
    connections = [each for each in psutil.Process().children() if each.name() == "ssh"]
    assert len(connections) == 2  # one a host
    for process in connections:
        process.kill()
    _, left = psutil.wait_procs(connections, timeout=WAIT_S)
    assert not left
    cell = mesh.submit_cell("while True: dist.all_reduce(torch.ones(4))")
    machines[1].cut()
    text = ""

    def is_reported(phrase: str) -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return phrase in text

    wait_until(lambda: is_reported("cm2 (ranks 2-3) is not heard"), WAIT_S, "it is reported")
    machines[1].mend()
    wait_until(lambda: is_reported("cm2 (ranks 2-3) is heard again"), WAIT_S, "it is heard again")
    assert not lost_ranks(mesh)
    assert not cell.done()
    cell.interrupt()
    cell.wait(WAIT_S)
    assert mesh.pull("kept").list == [5, 6, 7, 8]
    check_reduce(mesh)


def test_dead_first_host_is_started_again_or_replaced(
    mesh: cm.Mesh, machines: list[Host], runtime_dir: Path
) -> None:
    """It has the store."""
    for hosts, host in (("", "cm1"), ("cm3", "cm3")):
        machines[0].kill()
        wait_until(lambda: lost_ranks(mesh) == {0, 1}, WAIT_S, "the host is lost")
        assert mesh.heal(2, hosts=hosts).respawned == (0, 1)
        assert {mesh.report()[rank].host for rank in (0, 1)} == {host}
        assert mesh[[2, 3]].pull("kept").list == [7, 8]
        check_reduce(mesh)


def test_dead_hosts_are_started_again_as_far_as_they_can_be(
    machines: list[Host], runtime_dir: Path
) -> None:
    with cm.start(hosts="cm1:1,cm2:1,cm3:1", lease_s=60, host_lease_s=2) as mesh:
        mesh.cell("kept = rank + 5")
        for host in machines[1:3]:
            host.kill()
        wait_until(lambda: lost_ranks(mesh) == {1, 2}, WAIT_S, "both hosts are lost")
        machines[2].close_ssh()
        with pytest.raises(HostError, match=r"^cm3 is lost, and no agent could be started: cm3"):
            mesh.heal()
        assert lost_ranks(mesh) == {2}
        machines[2].mend()
        assert mesh.heal(0).respawned == (2,)
        assert mesh[0].pull("kept") == 5
        check_reduce(mesh, 3.0)


# ---- hosts that cannot run their part: errors name the host, the problem and the next step


BARE_PYTHON = os.path.realpath(sys.executable)  # of which the tests' environment was made


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            'shift; exec /nosuch/bin/python "$@"',
            r"cm2: the notebook's Python is not there .*Next: is cellmesh installed on cm2",
        ),
        (
            f'shift; cd /; exec env -u PYTHONPATH {BARE_PYTHON} "$@"',
            r"cm2: its Python has no cellmesh .*No module named cellmesh.*pip install cellmesh",
        ),
    ],
)
def test_host_that_lacks_something_is_named(
    command: str, message: str, machines: list[Host], runtime_dir: Path
) -> None:
    script = f'set -- {{command}}; if [ $(hostname) = cm2 ]; then {command}; else exec "$@"; fi'
    launch = f"ssh -o BatchMode=yes {{host}} '{script}'"
    with pytest.raises(HostError, match=f"(?s){message}"):
        cm.start(hosts="cm1:1,cm2:1", launch=launch)
    check_nothing_left(runtime_dir)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hosts": "cm1:1,10.77.3.254:1"}, HostError, "10.77.3.254: nothing listens .*start sshd"),
        ({"hosts": "cm1:1,10.77.3.1:1"}, MeshUsageError, "cm1 and 10.77.3.1 are one host"),
        ({"backend": "nccl"}, CellmeshError, "on cm[12]: --backend nccl needs a GPU"),
        ({"interface": "eth1"}, HostError, r"cm[12]: interface eth1 of cm[12] is down"),
    ],
)
def test_bad_option_is_named(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    machines: list[Host],
    runtime_dir: Path,
) -> None:
    for host in machines[:2]:
        host.inside("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth2")
        host.inside("ip", "addr", "add", f"10.78.0.{host.name[-1]}/24", "dev", "eth1")
    try:
        with pytest.raises(error, match=f"(?s){message}"):
            cm.start(**{"hosts": "cm1:1,cm2:1", **options})
    finally:
        for host in machines[:2]:
            host.inside("ip", "link", "del", "eth1")
    check_nothing_left(runtime_dir)


def test_host_that_refuses_the_key_is_named(
    machines: list[Host], runtime_dir: Path, tmp_path: Path
) -> None:
    """For cm2, the client has a key that no host knows."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{tmp_path}/key")
    name, known_hosts = machines[1].address, machines[1].directory.parent / "known_hosts"
    options = f"-F /dev/null -i {tmp_path}/key -o UserKnownHostsFile={known_hosts}"
    script = (
        f'if [ "$0" = {name} ]; then exec ssh {options} -o BatchMode=yes "$0" "$@"; '
        'else exec ssh "$0" "$@"; fi'
    )
    launch = f"sh -c '{script}' {{host}} {{command}}"
    message = rf"(?s){name}: the host refuses your key .*ssh-copy-id {name}"
    with pytest.raises(HostError, match=message):
        cm.start(hosts=f"cm1:1,{name}:1", launch=launch)
