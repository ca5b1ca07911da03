"""``cellmesh doctor --hosts`` on real hosts: what they lack, and what lies between them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .netns import Host, run
from .test_bad_input import BAD_HOSTS, on_cm2

Finding = dict[str, str]


def doctor(hosts: str, *options: str) -> tuple[int, list[Finding]]:
    """Run the command; return its exit code and findings."""
    done = subprocess.run(
        [sys.executable, "-m", "cellmesh", "doctor", "--json", "--hosts", hosts, *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    try:
        found: list[Finding] = json.loads(done.stdout)["findings"]
    except ValueError:
        raise AssertionError(done.stdout + done.stderr) from None
    return done.returncode, found


def say(findings: list[Finding], *statuses: str) -> str:
    return "\n".join(
        f"{each['title']}: {each['text']} [{each['remedy']}]"
        for each in findings
        if each["status"] in statuses
    )


def test_hosts_without_a_problem(machines: list[Host]) -> None:
    code, findings = doctor("cm1,cm2,cm3")
    assert not say(findings, "problem")
    assert code == 0
    well = say(findings, "ok")
    assert "interfaces: cm1 10.77.3.1 (eth0), cm2 10.77.3.2 (eth0), cm3 10.77.3.3 (eth0)" in well
    assert "routes and ports: each host reaches all others, and the notebook's" in well
    assert "clocks: cm1: +0.0" in well
    assert "the notebook's directory is the same one on all hosts" in well


SAID = {
    "no such Python": r"cm2: the notebook's Python is not there",
    "no cellmesh": "cm2: its Python has no cellmesh",
    "no torch": "cm2: torch: ModuleNotFoundError: No module named 'torch'",
    "another Python": "versions: hosts differ in their Python: ",
    "a full disk": "cm2: runtime directory: ",
}


@pytest.mark.parametrize("what", BAD_HOSTS)
def test_host_that_lacks_something_is_named(
    what: str, machines: list[Host], tmp_path: Path
) -> None:
    command: Callable[[Path], str] = BAD_HOSTS[what][0]
    options: dict[str, Any] = on_cm2(command(tmp_path))
    try:
        code, findings = doctor("cm1,cm2", "--launch", options["launch"])
    finally:
        if what == "a full disk":
            pid = str(machines[1].processes()[0].pid)
            run("nsenter", "-m", "-t", pid, "umount", str(tmp_path))
    assert code == 1
    said = say(findings, "problem")
    assert SAID[what] in said
    assert "cm1: " not in said


def test_names_that_cannot_be_used(machines: list[Host]) -> None:
    """One that does not resolve, one whose ssh port is closed, and two of one host."""
    code, findings = doctor("cm1,10.77.3.1,10.77.3.254,nosuch.invalid")
    assert code == 1
    said = say(findings, "problem")
    assert "names: cm1 and 10.77.3.1 are one host" in said
    assert "nosuch.invalid: the name does not resolve" in said
    assert "10.77.3.254: nothing listens on the host's ssh port" in said


def test_blocked_ports_between_hosts_are_a_problem(machines: list[Host]) -> None:
    """Of cm2, all but ssh's: its agent would connect to the notebook's host."""
    machines[1]._filter("tcp dport != 22 ct state new drop")
    code, findings = doctor("cm1,cm2")
    assert code == 1
    said = say(findings, "problem", "warning")
    assert "routes and ports: cm1 does not reach cm2 on any TCP port: timed out" in said
    assert "open TCP ports to 10.77.3.2 in the firewall of cm2" in said
    assert "cm2 does not reach" not in said
    assert "the notebook's host does not reach cm2" not in said
    assert "its agent connects to the notebook's host instead" in say(findings, "ok")


def test_hosts_that_only_ssh_reaches_can_be_used(machines: list[Host]) -> None:
    machines[1].close_ports()
    machines[1].close_way_out()
    code, findings = doctor("cm2")
    assert code == 0
    assert "its agent is reached through ssh's forwarding only" in say(findings, "warning")


def test_interface_that_a_host_lacks_is_named(machines: list[Host]) -> None:
    code, findings = doctor("cm1,cm2", "--interface", "eth9")
    assert code == 1
    assert "interfaces: cm2: cm2 has no interface eth9 with an address" in say(findings, "problem")


def test_host_that_refuses_the_key_is_named(machines: list[Host]) -> None:
    ssh = "ssh -o BatchMode=yes -o PreferredAuthentications=none {host} {command}"
    code, findings = doctor("cm1", "--launch", ssh)
    assert code == 1
    said = say(findings, "problem")
    assert "cm1: the host refuses your key" in said
    assert "ssh-copy-id cm1" in said
