"""Hosts and their ranks, and the command that starts an agent on each."""

from __future__ import annotations

import pytest

from cellmesh.controller.host_list import awaited_hosts, command_for, has_stdin, parse_hosts
from cellmesh.errors import MeshUsageError
from cellmesh.wire.hosts import Host

A2, B2 = Host("a", num_ranks=2), Host("b", num_ranks=2)


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "nproc_per_host", "expected"),
    [
        ("a:2,b:2", None, None, (A2, B2)),
        (" a:2 , b:2 ", 4, None, (A2, B2)),
        (["a:2", "b:2"], None, None, (A2, B2)),
        ("a,b", 4, None, (A2, B2)),
        ("a,b", None, 2, (A2, B2)),
        ("a:1,b", 3, None, (Host("a", num_ranks=1), B2)),
        ("a:1,b", None, 2, (Host("a", num_ranks=1), B2)),
        ("root@node-1.site:3", None, None, (Host("root@node-1.site", num_ranks=3),)),
        ("10.0.0.1:2", None, None, (Host("10.0.0.1", num_ranks=2),)),
    ],
)
def test_hosts_are_read_with_their_ranks(
    hosts: str | list[str],
    num_ranks: int | None,
    nproc_per_host: int | None,
    expected: tuple[Host, ...],
) -> None:
    assert parse_hosts(hosts, num_ranks, nproc_per_host) == expected


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "nproc_per_host", "message"),
    [
        ("", None, None, "names no host"),
        (" , ", None, None, "names no host"),
        ("a,b", None, None, "how many ranks run on a, b"),
        ("a,b", 3, None, "cannot be divided"),
        ("a:4,b", 4, None, "cannot be divided"),
        ("a:2,b:2", 5, None, "4 ranks in all, and the mesh 5"),
        ("a:0", None, None, "'a:0' is no host"),
        ("a:x", None, None, "'a:x' is no host"),
        ("a b:2", None, None, "is no host"),
        ("-oProxyCommand=x:2", None, None, "is no host"),
        ("a:1,a:2", None, None, "names 'a' twice"),
        ("a,b", None, 0, "at least 1"),
        (",".join(f"h{i}:1" for i in range(300)), None, None, "at most 256"),
    ],
)
def test_hosts_that_cannot_be_are_refused(
    hosts: str, num_ranks: int | None, nproc_per_host: int | None, message: str
) -> None:
    with pytest.raises(MeshUsageError, match=message):
        parse_hosts(hosts, num_ranks, nproc_per_host)


COMMAND = ["/opt/my env/python", "-m", "cellmesh"]


SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "n1"]
COPIES = "sh -c 'scp {ticket} {host}:{ticket} && ssh {host} {command}'"
COPIED = f"scp /t n1:/t && ssh n1 '{COMMAND[0]}' -m cellmesh"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{command}", COMMAND),
        ("docker exec -i {host} {command}", ["docker", "exec", "-i", "n1", *COMMAND]),
        ("kubectl exec pod-{host} -- {command}", ["kubectl", "exec", "pod-n1", "--", *COMMAND]),
        ("sh -c 'exec {command}'", ["sh", "-c", "exec '/opt/my env/python' -m cellmesh"]),
        ("", [*SSH, "'/opt/my env/python' -m cellmesh"]),
        (COPIES, ["sh", "-c", COPIED]),
    ],
)
def test_command_stands_where_the_template_says(template: str, expected: list[str]) -> None:
    assert command_for(template, "n1", COMMAND, "/t") == expected
    assert has_stdin(template) == (template != COPIES)


@pytest.mark.parametrize(
    ("template", "message"),
    [("ssh {host}", "lacks {command}"), ("ssh 'open {command}", "is no command line")],
)
def test_template_without_a_command_is_refused(template: str, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        command_for(template, "n1", COMMAND)


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "nproc_per_host", "expected"),
    [(2, None, 4, [4, 4]), (2, 6, None, [3, 3]), (1, 2, 2, [2])],
)
def test_hosts_that_announce_themselves_have_equal_numbers(
    nodes: int, num_ranks: int | None, nproc_per_host: int | None, expected: list[int]
) -> None:
    hosts = awaited_hosts("hand", nodes, num_ranks, nproc_per_host)
    assert [host.num_ranks for host in hosts] == expected


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "message"),
    [(None, 4, "--nodes 2"), (0, 4, "not 0"), (2, None, "--nproc-per-host"), (2, 3, "equally")],
)
def test_hosts_that_announce_themselves_are_counted_before(
    nodes: int | None, num_ranks: int | None, message: str
) -> None:
    with pytest.raises(MeshUsageError, match=message):
        awaited_hosts("hand", nodes, num_ranks, None)
