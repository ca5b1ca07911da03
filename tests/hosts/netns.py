"""Hosts on one machine: each a network namespace with an address, a host name, directories and an
sshd of its own, and a mount namespace with a file tree of its own. Needs root, iproute2,
openssh-server and nftables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import lender

NETWORK = "10.77.3"
NOTEBOOK = f"{NETWORK}.254"
_START_S = 20.0
_NEW = "tcp flags & (syn|ack) == syn"


def run(*command: str) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: its host name, which ssh resolves.
        address: on the network of all hosts.
        directory: what is its own.
        project: a directory that each host has for itself: what the notebook's host writes there
            is on no other host. All began with the same files.
        pid: of its sshd, once it is up.
    """

    name: str
    address: str
    directory: Path
    project: Path
    pid: int = 0

    def start(
        self, *command: str, stdin: bytes | None = None, has_terminal: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host, as a person with ssh does; its output goes into a log.

        Args:
            command: the words of the command.
            stdin: what it reads first; None for nothing.
            has_terminal: its standard input is a terminal.
        """
        client = self.directory.parent / "bin/ssh"
        with open(self.directory / "started.log", "ab") as log:
            process = subprocess.Popen(
                [str(client), *(["-tt"] if has_terminal else []), self.name, shlex.join(command)],
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.flush()
        return process

    def read_log(self) -> str:
        """Return what `start`ed commands have printed."""
        path = self.directory / "started.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def inside(self, *command: str) -> str:
        """Run a command in the host's network."""
        return run("ip", "netns", "exec", self.name, *command)

    def shell(self, script: str) -> str:
        """Run a script as a user who has logged in, in the host's own file tree."""
        return run("ssh", self.name, script)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the host."""
        found = []
        for pid in run("ip", "netns", "pids", self.name).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def meshes(self) -> list[psutil.Process]:
        """Return the processes of meshes on the host."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("cellmesh"):
                    found.append(process)
        return found

    def cut(self) -> None:
        """Pull the cable."""
        self.inside("ip", "link", "set", "eth0", "down")

    def deafen(self) -> None:
        """Drop what arrives, and nothing that is sent."""
        self._filter("drop")

    def mute(self) -> None:
        """Drop what the host sends, and nothing that arrives."""
        self._filter("drop", "out")

    def freeze(self) -> None:
        """Stop the agent, and nothing else."""
        for process in self.meshes():
            if process.name() == "cellmesh-agent":
                process.suspend()

    def lose(self, percent: int) -> None:
        """Drop some of the packets that arrive."""
        self._filter(f"numgen random mod 100 < {percent} drop")

    def slow(self, rate: str) -> None:
        """Send no faster than, say, ``1mbit``."""
        self.inside(
            *("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", rate, "burst", "32kbit", "latency", "400ms"),
        )

    def slow_down(self, rate: str) -> None:
        """Receive no faster than, say, ``100mbit``."""
        number = self.name.removeprefix("cm")
        run(
            *("tc", "qdisc", "replace", "dev", f"cmv{number}", "root", "tbf"),
            *("rate", rate, "burst", "256kbit", "latency", "400ms"),
        )

    def num_bytes(self) -> tuple[int, int]:
        """Return how many bytes the host has received and sent."""
        directory = "/sys/class/net/eth0/statistics"
        statistics = self.inside("cat", f"{directory}/rx_bytes", f"{directory}/tx_bytes")
        received, sent = map(int, statistics.split())
        return received, sent

    def _filter(self, rule: str, way: str = "in") -> None:
        hook, interface = ("input", "iif") if way == "in" else ("output", "oif")
        self.inside("nft", "add table inet cm")
        self.inside("nft", f"add chain inet cm {way} {{ type filter hook {hook} priority 0; }}")
        self.inside("nft", f"add rule inet cm {way} {interface} eth0 {rule}")

    def close_ports(self, how: str = "drop") -> None:
        """Refuse the notebook's host every new connection but ssh's: drop or reject it."""
        self._filter(f"ip saddr {NOTEBOOK} tcp dport != 22 {_NEW} {how}")

    def close_ssh(self) -> None:
        """Refuse everybody new connections by ssh."""
        self._filter(f"tcp dport 22 {_NEW} reject")

    def close_to_notebook(self) -> None:
        """Drop all that the notebook's host sends."""
        self._filter(f"ip saddr {NOTEBOOK} drop")

    def mend(self) -> None:
        """Undo all of the above."""
        self.inside("ip", "link", "set", "eth0", "up")
        for command in (
            ("nft", "delete", "table", "inet", "cm"),
            ("tc", "qdisc", "del", "dev", "eth0", "root"),
        ):
            with contextlib.suppress(RuntimeError):
                self.inside(*command)
        with contextlib.suppress(RuntimeError):
            number = self.name.removeprefix("cm")
            run("tc", "qdisc", "del", "dev", f"cmv{number}", "root")
        for process in self.meshes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill(self, leaves_files: bool = False) -> None:
        """End every process of the host at once, but its sshd and its lender, and empty its runtime
        directory, as a restart does where that is in memory.
        """
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name() not in ("sshd", "unshare", lender.NAME):
                    process.kill()
        if not leaves_files:
            shutil.rmtree(self.directory / "run/cellmesh", ignore_errors=True)


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[tuple[list[Host], Path]]:
    """Make hosts; yield them, and a directory with an `ssh` that knows them."""
    root = Path(tempfile.mkdtemp(prefix="cmh", dir="/tmp"))
    made: list[Host] = []
    sshds: list[subprocess.Popen[bytes]] = []
    try:
        _keygen(root / "key")
        for directory in ("project", "installed"):
            (root / directory).mkdir()
            (root / directory / "installed.py").write_text("VERSION = 0\n")
        run("ip", "link", "add", "cmbr", "type", "bridge")
        run("ip", "addr", "add", f"{NOTEBOOK}/24", "dev", "cmbr")
        run("ip", "link", "set", "cmbr", "up")
        names = {f"cm{number}": f"{NETWORK}.{number}" for number in range(1, num_hosts + 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (root / "hosts").write_text("\n".join(lines) + "\n")
        for name, address in names.items():
            made.append(host := Host(name, address, root / name, root / "project"))
            sshds.append(_start(host, root))
            made[-1] = dataclasses.replace(host, pid=sshds[-1].pid)
        _write_client(root, made)
        for host in made:
            _await_ssh(host, root)
        yield made, root / "bin"
    finally:
        for host in made:
            with contextlib.suppress(RuntimeError):
                for process in host.processes():
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        for sshd in sshds:
            sshd.kill()
            sshd.wait()
        for host in made:
            with contextlib.suppress(RuntimeError):
                run("ip", "netns", "del", host.name)
        with contextlib.suppress(RuntimeError):
            run("ip", "link", "del", "cmbr")
        shutil.rmtree(root, ignore_errors=True)


def _keygen(path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))


def _start(host: Host, root: Path) -> subprocess.Popen[bytes]:
    number = host.name.removeprefix("cm")
    run("ip", "netns", "add", host.name)
    peer = ("peer", "name", "eth0", "netns", host.name)
    run("ip", "link", "add", f"cmv{number}", "type", "veth", *peer)
    run("ip", "link", "set", f"cmv{number}", "master", "cmbr", "up")
    host.inside("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    host.inside("ip", "link", "set", "eth0", "up")
    host.inside("ip", "link", "set", "lo", "up")
    for name in ("tmp", "run", "etc", "disk"):
        (host.directory / name).mkdir(parents=True)
    _keygen(host.directory / "etc/hostkey")
    # Hosts run the same checkout as the tests, where that is not the one that is installed.
    own_path = ":".join([str(lender.SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = host.directory / "etc/sshd_config"
    config.write_text(
        f"ListenAddress {host.address}\n"
        f"HostKey {host.directory}/etc/hostkey\n"
        f"AuthorizedKeysFile {root}/key.pub\n"
        "PasswordAuthentication no\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PermitRootLogin yes\nMaxStartups 100\n"
        f"SetEnv TMPDIR={host.directory}/tmp JUPYTER_RUNTIME_DIR={host.directory}/run "
        f"PYTHONPATH={own_path}\n"
    )
    disk = host.directory / "disk"
    script = (
        f"hostname {host.name}; mount --bind '{root}/hosts' /etc/hosts; "
        "mount -t tmpfs tmpfs /run; mkdir -p /run/sshd; "
        f"mount -t tmpfs tmpfs {disk} && mkdir {disk}/upper {disk}/work && "
        f"mount -t overlay overlay -o lowerdir={root}/installed,upperdir={disk}/upper,"
        f"workdir={disk}/work {host.project} && "
        f"exec /usr/sbin/sshd -D -e -f '{config}'"
    )
    unshare = ("unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", script)
    with open(host.directory / "sshd.log", "wb") as log:
        return subprocess.Popen(
            ("ip", "netns", "exec", host.name, *unshare),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _write_client(root: Path, made: list[Host]) -> None:
    known, config = [], []
    for host in made:
        key = " ".join((host.directory / "etc/hostkey.pub").read_text().split()[:2])
        known.append(f"{host.address},{host.name} {key}\n")
        config.append(
            f"Host {host.name} {host.address}\n    HostName {host.address}\n    User root\n"
            f"    IdentityFile {root}/key\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {root}/known_hosts\n    StrictHostKeyChecking yes\n"
        )
    (root / "known_hosts").write_text("".join(known))
    (root / "ssh_config").write_text("".join(config))
    (root / "bin").mkdir()
    client = root / "bin/ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {root}/ssh_config "$@"\n')
    client.chmod(0o755)


def _await_ssh(host: Host, root: Path) -> None:
    deadline = time.monotonic() + _START_S
    command = [str(root / "bin/ssh"), "-o", "ConnectTimeout=1", host.name, "true"]
    while subprocess.run(command, capture_output=True).returncode:
        if time.monotonic() > deadline:
            log = (host.directory / "sshd.log").read_text()
            raise RuntimeError(f"sshd of {host.name} does not answer: {log}")
