"""The checks of ``cellmesh doctor --hosts`` on made-up hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cellmesh.cli.doctor.checks import Finding
from cellmesh.cli.doctor.host_checks import (
    NOTEBOOK,
    HostReport,
    HostsFacts,
    Notebook,
    examine_hosts,
    refuse_engine,
)
from cellmesh.cli.doctor.host_probe import HostFacts
from cellmesh.cli.main import main
from cellmesh.controller.core.clocks import ClockOffset
from cellmesh.controller.session.launch.host_failure import HostFailure
from cellmesh.wire.host import Place
from cellmesh.wire.versions import Versions

from .test_checks import HEALTHY, change

VERSIONS = Versions("0.1.0", "3.11.7", "2.13.0", "2.27.5")


def host(number: int, **fields: Any) -> HostFacts:
    facts = HostFacts(
        host_name=f"node{number}",
        place=Place(host=f"node{number}", boot=str(number), pid_namespace="1"),
        versions=VERSIONS,
        address=f"10.0.0.{number}",
        interface="eth0",
        address_error="",
        port=40000,
        folder="shared",
        facts=HEALTHY,
    )
    return msgspec.structs.replace(facts, **fields)


A, B = host(1), host(2)


def both(
    a: HostFacts | HostFailure = A,
    b: HostFacts | HostFailure = B,
    unreached: Mapping[str, str] = {},
    clock: ClockOffset | None = None,
    notebook: Mapping[str, str] = {},
    is_ssh: bool = True,
) -> HostsFacts:
    return HostsFacts(
        is_ssh,
        Notebook(notebook, VERSIONS),
        {"a": HostReport(a), "b": HostReport(b, clock, unreached)},
    )


def not_ok(facts: HostsFacts) -> list[Finding]:
    return [finding for finding in examine_hosts(facts) if finding.status != "ok"]


def test_healthy_hosts_have_no_problem() -> None:
    findings = examine_hosts(both(clock=ClockOffset("b", 0.002, 0.001)))
    assert {finding.status for finding in findings} == {"ok"}
    texts = "\n".join(f"{finding.title}: {finding.text}" for finding in findings)
    assert "interfaces: a 10.0.0.1 (eth0), b 10.0.0.2 (eth0)" in texts
    assert "clocks: b: +0.0020 s ± 1 ms" in texts


INSTALL = "/env/bin/python -m pip install cellmesh==0.1.0 torch==2.13.0"
NO_TORCH = msgspec.structs.replace(HEALTHY.probe, torch=None, error="No module named 'torch'")


@pytest.mark.parametrize(
    ("facts", "status", "text", "remedy"),
    [
        (
            both(b=HostFailure("the host refuses your key", "`ssh-copy-id b`", "Permission")),
            "problem",
            "b: the host refuses your key: Permission",
            "ssh-copy-id",
        ),
        (both(b=host(1)), "problem", "names: a and b are one host", "name it once"),
        (
            both(b=host(2, address="127.0.0.1")),
            "problem",
            "names: b is reached by the loopback",
            "--interface",
        ),
        *(
            (
                both(b=host(2, versions=other)),
                "problem",
                f"versions: hosts differ in their {what}",
                mend,
            )
            for what, other, mend in (
                ("cellmesh", Versions("0.0.9", "3.11.7", "2.13.0"), INSTALL),
                ("Python", Versions("0.1.0", "3.12.1", "2.13.0"), "on b: make an environment with"),
                ("torch", Versions("0.1.0", "3.11.7", "2.11.0"), INSTALL),
                ("NCCL", Versions("0.1.0", "3.11.7", "2.13.0", "2.21.5"), "of NCCL's package"),
            )
        ),
        (
            both(b=host(2, facts=change(HEALTHY, "probe", NO_TORCH))),
            "problem",
            "b: torch: No module named 'torch'",
            "install torch",
        ),
        (
            both(b=host(2, facts=change(HEALTHY, "runtime_error", "No space left on device"))),
            "problem",
            "b: runtime directory: No space left",
            "JUPYTER_RUNTIME_DIR",
        ),
        (
            both(b=host(2, address="", address_error="interface ib0 of node2 is down")),
            "problem",
            "interfaces: b: interface ib0 of node2 is down",
            "--interface",
        ),
        (
            both(unreached={"a": "timed out"}),
            "problem",
            "routes and ports: b does not reach a on any TCP port: timed out",
            "10.0.0.1 in the firewall of a",
        ),
        (
            both(notebook={"b": "timed out"}, unreached={NOTEBOOK: "refused"}),
            "warning",
            f"routes and ports: {NOTEBOOK} does not reach b on any TCP port (timed out), nor b "
            f"{NOTEBOOK} (refused): its agent is reached through ssh's forwarding",
            "AllowTcpForwarding",
        ),
        (
            both(notebook={"b": "timed out"}, unreached={NOTEBOOK: "refused"}, is_ssh=False),
            "problem",
            f"routes and ports: {NOTEBOOK} does not reach b on any TCP port (timed out), nor b",
            "10.0.0.2 in the firewall of b",
        ),
        (
            both(clock=ClockOffset("b", 3600.5, 0.001)),
            "warning",
            "clocks: b: +3,600.5000 s ± 1 ms",
            "on b: `timedatectl",
        ),
        (both(b=host(2, folder="other")), "warning", "shared folder: the notebook's", "shared"),
    ],
)
def test_what_is_wrong_is_named_with_what_mends_it(
    facts: HostsFacts, status: str, text: str, remedy: str
) -> None:
    (finding,) = not_ok(facts)
    assert finding.status == status
    assert f"{finding.title}: {finding.text}".startswith(text)
    assert remedy in finding.remedy


@pytest.mark.parametrize("is_ssh", [True, False])
@pytest.mark.parametrize(
    ("notebook", "unreached", "text"),
    [
        ({"b": "timed out"}, {}, "its agent connects to the notebook's host instead"),
        ({}, {NOTEBOOK: "timed out"}, f"b does not reach {NOTEBOOK} (timed out), and need not"),
    ],
)
def test_one_open_way_to_an_agent_is_enough(
    notebook: dict[str, str], unreached: dict[str, str], text: str, is_ssh: bool
) -> None:
    findings = examine_hosts(both(notebook=notebook, unreached=unreached, is_ssh=is_ssh))
    (found,) = [each for each in findings if each.title == "routes and ports"]
    assert found.status == "ok"
    assert text in found.text


@pytest.mark.parametrize(
    ("launch", "instead"),
    [
        ("slurm", "cellmesh doctor --hosts A,B --launch 'srun "),
        ("ray", "`ray status`"),
        ("hand", "`cellmesh doctor --no-start`, run on each"),
        ("torchrun", "`cellmesh doctor --hosts A,B` checks"),
    ],
)
@pytest.mark.parametrize("hosts", [(), ("--hosts", "a,b")])
def test_engine_that_cannot_be_checked_is_refused_with_what_can(
    launch: str, instead: str, hosts: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(main, ["doctor", *hosts, "--launch", launch])
    assert done.exit_code == 2
    assert instead in " ".join(done.output.split())


def test_command_is_no_engine() -> None:
    assert refuse_engine("") == refuse_engine("docker exec -i {host} {command}") == ""


def test_two_nodes_of_an_engine_may_be_one_host() -> None:
    assert not not_ok(both(b=host(1), is_ssh=False))


def test_directory_that_is_not_on_a_host_is_said() -> None:
    (found,) = [each for each in examine_hosts(both(b=host(2, folder="none"))) if "~" in each.text]
    assert (found.status, found.title) == ("ok", "shared folder")


def test_hosts_that_do_not_answer_are_not_compared() -> None:
    failure = HostFailure("the name does not resolve", "write it as DNS has it", "")
    assert [finding.title for finding in examine_hosts(both(failure, failure))] == ["a", "b"]
