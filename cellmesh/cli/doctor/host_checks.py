"""The checks of `doctor --hosts`: what hosts lack, and what lies between them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address

import msgspec

from ...controller.core.clocks import ClockOffset
from ...controller.session.launch.host_failure import HostFailure
from ...wire.host import fits
from ...wire.versions import Versions, describe_mismatch, own_versions
from .checks import Finding, examine
from .host_probe import HostFacts

NOTEBOOK = "the notebook's host"
_BY_COMMAND = "`cellmesh doctor --hosts A,B --launch '{}'`"
_BY_SSH = "`cellmesh doctor --hosts A,B` checks hosts that ssh reaches"
# What starts agents without a command that this process could run on any host -> what can be
# checked all the same, and by which command.
_ENGINES = {
    "slurm": "it does not ask Slurm for nodes. Within an allocation (salloc, sbatch), "
    + _BY_COMMAND.format("srun --overlap --nodes=1 --ntasks=1 --nodelist={host} {command}")
    + " checks its nodes as a start would use them; else `sinfo` shows nodes and partitions",
    "ray": "it runs nothing by Ray. `ray status` shows what its nodes give, " + _BY_SSH + ", and "
    "`cellmesh doctor --no-start`, run on a node, that node",
    "hand": "nothing is started on hosts from here. `cellmesh doctor --no-start`, run on each, "
    "checks that host, and " + _BY_SSH + " with what lies between them",
}
_ENGINES["torchrun"] = _ENGINES["hand"]
# A clock that is further off is not kept by NTP.
_APART_S = 1.0


class HostReport(msgspec.Struct, frozen=True):
    """What is known of one host.

    Attributes:
        answer: its facts, or why there are none.
        clock: how far its system clock is ahead.
        unreached: other host -> why this host does not reach it.
    """

    answer: HostFacts | HostFailure
    clock: ClockOffset | None = None
    unreached: Mapping[str, str] = {}


class Notebook(msgspec.Struct, frozen=True):
    """What is known of the notebook's host.

    Attributes:
        unreached: host -> why it is not reached.
        versions: of its packages.
    """

    unreached: Mapping[str, str] = {}
    versions: Versions = msgspec.field(default_factory=own_versions)


class HostsFacts(msgspec.Struct, frozen=True):
    """The notebook's host, and the others by name; `is_ssh`: by which two names can be one host."""

    is_ssh: bool
    notebook: Notebook
    hosts: Mapping[str, HostReport]

    @property
    def there(self) -> dict[str, HostFacts]:
        """The hosts that have answered."""
        return {
            name: report.answer
            for name, report in self.hosts.items()
            if isinstance(report.answer, HostFacts)
        }


def refuse_engine(launch: str) -> str:
    """Return why hosts cannot be checked by an engine, and what checks them; "" for a command."""
    instead = _ENGINES.get(launch)
    return f"`cellmesh doctor` has no check of --launch {launch}: {instead}" if instead else ""


def examine_hosts(facts: HostsFacts) -> list[Finding]:
    """Run all checks: of each host, then of what lies between hosts."""
    findings = []
    for name, report in facts.hosts.items():
        if isinstance(report.answer, HostFailure):
            failure = report.answer
            said = f": {failure.said}" if failure.said else ""
            findings.append(Finding(name, "problem", failure.text + said, failure.remedy))
        else:
            findings += _examine_one(name, report.answer)
    if facts.there:
        for title, check in CHECKS.items():
            findings += check(title, facts)
    return findings


def _examine_one(name: str, host: HostFacts) -> Iterable[Finding]:
    found = [each for each in examine(host.facts) if each.status != "ok"]
    for each in found:
        yield msgspec.structs.replace(each, title=f"{name}: {each.title}")
    if not found:
        torch = host.facts.probe.torch
        text = f"{host.host_name}: Python {host.facts.python}, {host.facts.num_cores} cores, " + (
            f"{len(host.facts.probe.driver.gpus)} GPUs, torch {torch.version}" if torch else ""
        )
        yield Finding(name, "ok", text)


def check_names(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Look for two names of one host, and for hosts that others cannot address."""
    by_place: dict[object, list[str]] = {}
    for name, host in facts.there.items():
        by_place.setdefault((host.place, host.address), []).append(name)
    for names in by_place.values():
        if facts.is_ssh and len(names) > 1:
            yield Finding(
                title,
                "problem",
                f"{' and '.join(names)} are one host",
                f"name it once, with all its ranks: `--hosts {names[0]}:8`",
            )
    loops = [
        name
        for name, host in facts.there.items()
        if host.address and ip_address(host.address).is_loopback
    ]
    if loops and len(facts.hosts) > len(loops):
        yield Finding(
            title,
            "problem",
            f"{', '.join(loops)} is reached by the loopback, which the other hosts cannot use",
            "name it as they would, or use --interface",
        )


def check_versions(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Compare the packages of all hosts, and of the notebook's; a check of its own finds a host
    without torch.
    """
    there = {name: host for name, host in facts.there.items() if host.facts.probe.torch is not None}
    own = facts.notebook.versions
    problem = describe_mismatch({NOTEBOOK: own} | {name: h.versions for name, h in there.items()})
    if problem:
        yield Finding(title, "problem", problem, _mend_versions(own, there))
    else:
        text = f"cellmesh {own.cellmesh}, Python {own.python}, torch {own.torch} on all of them"
        yield Finding(title, "ok", text)


def _mend_versions(own: Versions, there: Mapping[str, HostFacts]) -> str:
    others = [name for name, host in there.items() if not fits(own.python, host.versions.python)]
    if others:
        return (
            f"on {', '.join(others)}: make an environment with Python {own.python}, and install "
            f"cellmesh=={own.cellmesh} and torch=={own.torch} there, at the notebook's path "
            f"({sys.prefix}); or run the notebook with their Python"
        )
    pythons = dict.fromkeys(host.facts.executable for host in there.values())
    lines = (
        f"`{python} -m pip install cellmesh=={own.cellmesh} torch=={own.torch}`"
        for python in pythons
    )
    nccl = ", and the same version of NCCL's package" if own.nccl else ""
    return f"with the Python of each host that differs: {', '.join(lines)}{nccl}"


def check_interfaces(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Show the address that each host's agent, ranks and store would use."""
    used = []
    for name, host in facts.there.items():
        if host.address_error:
            yield Finding(
                title,
                "problem",
                f"{name}: {host.address_error}",
                "name another interface with --interface; `ip addr` there lists them",
            )
        else:
            used.append(f"{name} {host.address} ({host.interface})")
    if used:
        yield Finding(title, "ok", ", ".join(used))


def check_routes(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Look for pairs of hosts without a TCP connection, each way, and for the way by which the
    notebook's host reaches each agent.
    """
    findings = []
    for begin, report in facts.hosts.items():
        for end in report.unreached.keys() - {NOTEBOOK}:
            text = f"{begin} does not reach {end} on any TCP port: {report.unreached[end]}"
            mend = (
                f"{_open_ports(facts, end)} for all hosts of the mesh, or name an interface that "
                "it leaves open: `--interface`"
            )
            findings.append(Finding(title, "problem", text, mend))
    for name in facts.there:
        findings += _check_way(title, facts, name)
    yield from findings or [
        Finding(title, "ok", "each host reaches all others, and the notebook's, over TCP")
    ]


def _check_way(title: str, facts: HostsFacts, name: str) -> Iterable[Finding]:
    """Say which of the ways a start would take to a host's agent, if it is not the first."""
    closed = facts.notebook.unreached.get(name)
    back = facts.hosts[name].unreached.get(NOTEBOOK)
    if closed is None:
        if back is not None:
            text = (
                f"{name} does not reach {NOTEBOOK} ({back}), and need not, as the notebook "
                "connects to its agent; by hand and with torchrun, it would have to"
            )
            yield Finding(title, "ok", text)
        return
    text = f"{NOTEBOOK} does not reach {name} on any TCP port ({closed})"
    if back is None:
        text += ": its agent connects to the notebook's host instead, which is open"
        yield Finding(title, "ok", text)
        return
    text += f", nor {name} {NOTEBOOK} ({back})"
    mend = f"{_open_ports(facts, name)} for the notebook's host, or those of the notebook's for it"
    if facts.is_ssh:
        yield Finding(
            title,
            "warning",
            f"{text}: its agent is reached through ssh's forwarding only",
            f"nothing, if sshd there has `AllowTcpForwarding yes`, as by default; else {mend}",
        )
    else:
        mend += "; or start agents by ssh, which forwards: leave out --launch"
        yield Finding(title, "problem", text, mend)


def _open_ports(facts: HostsFacts, name: str) -> str:
    host = facts.there.get(name)
    address = f" {host.address}" if host is not None else ""
    return f"open TCP ports to{address} in the firewall of {name}"


def check_clocks(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Compare system clocks; timelines do not depend on them."""
    clocks = [report.clock for report in facts.hosts.values() if report.clock is not None]
    off = [clock for clock in clocks if abs(clock.offset_s) - clock.error_s > _APART_S]
    for clock in off:
        yield Finding(
            title,
            "warning",
            f"{clock.describe()}; times of files and logs differ (timelines are corrected)",
            f"on {clock.host}: `timedatectl set-ntp true`",
        )
    if clocks and not off:
        yield Finding(title, "ok", ", ".join(clock.describe() for clock in clocks))


def check_folders(title: str, facts: HostsFacts) -> Iterable[Finding]:
    """Look for the notebook's directory on the hosts."""
    others = [name for name, host in facts.there.items() if host.folder == "other"]
    missing = [name for name, host in facts.there.items() if host.folder == "none"]
    if others:
        yield Finding(
            title,
            "warning",
            f"the notebook's directory has other files on {', '.join(others)}",
            "data and checkpoints that ranks are to share need a shared file system",
        )
    if missing:
        text = f"the notebook's directory is not on {', '.join(missing)}: ranks begin in ~ there"
        yield Finding(title, "ok", text)
    if not others and not missing:
        yield Finding(title, "ok", "the notebook's directory is the same one on all hosts")


CHECKS: Mapping[str, Callable[[str, HostsFacts], Iterable[Finding]]] = {
    "names": check_names,
    "versions": check_versions,
    "interfaces": check_interfaces,
    "routes and ports": check_routes,
    "clocks": check_clocks,
    "shared folder": check_folders,
}
