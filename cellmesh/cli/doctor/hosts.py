"""Gathers the facts of many hosts for `doctor --hosts`: each by a process that is started there as
an agent would be, and what lies between hosts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ...controller.core.clocks import NUM_FIRST, ClockComparison, ClockOffset
from ...controller.host_list import HostEntry, command_for
from ...controller.session.launch.host_failure import HostFailure, explain
from ...wire.descriptors import wait_readable
from ...wire.rendezvous import own_addresses
from .host_checks import NOTEBOOK, HostReport, HostsFacts, Notebook
from .host_probe import (
    MARK,
    Answer,
    ClockReading,
    HostFacts,
    Look,
    Peer,
    Question,
    Reach,
    Reached,
    ReadClock,
    listen,
    reach,
)

_ANSWER_S = 200.0  # importing torch from a slow disk included


def gather_hosts(
    entries: Sequence[HostEntry], launch: str, interface: str, report: Callable[[str], None]
) -> HostsFacts:
    """Ask all hosts at once. Takes as long as importing torch on the slowest.

    Args:
        entries: the hosts.
        launch: the command line that starts an agent; "" for ssh.
        interface: that the user has named; "" for none.
        report: called with what is being looked at.

    Raises:
        MeshUsageError: the command line cannot be used.
    """
    probes = [_HostProbe(entry, launch) for entry in entries]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(probes)) as pool:
        for probe in probes:
            stack.callback(probe.close)
        report(f"asking {', '.join(entry.name for entry in entries)}")
        with _marker(os.getcwd()) as marker:
            notebook = (socket.gethostname(), *own_addresses())
            look = Look(0, notebook, launch, interface, os.getcwd(), marker)
            looked = [*pool.map(lambda probe: probe.look(look), probes)]
        report("comparing clocks")
        clocks = [*pool.map(lambda probe: probe.compare_clocks(), probes)]
        report("connecting hosts")
        ours: dict[str, Peer] = {}
        peers = [
            Peer(entry.name, facts.address, facts.port)
            for entry, facts in zip(entries, looked, strict=True)
            if isinstance(facts, HostFacts) and facts.port
        ]
        for peer in peers:
            server = _listen_for(peer)
            if server is not None:
                address, port = stack.enter_context(server).getsockname()[:2]
                ours[peer.name] = Peer(NOTEBOOK, address, port)
        reached = [*pool.map(lambda probe: probe.reach(peers, ours), probes)]
        own = Notebook(reach(tuple(peers)))
    return HostsFacts(
        not launch,
        own,
        {
            entry.name: HostReport(*each)
            for entry, *each in zip(entries, looked, clocks, reached, strict=True)
        },
    )


@contextlib.contextmanager
def _marker(directory: str) -> Iterator[str]:
    """Make a file in a directory for as long as it takes; "" where that is not allowed."""
    with contextlib.ExitStack() as stack:
        name = ""
        with contextlib.suppress(OSError):
            prefix = ".cellmesh-doctor-"
            name = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=directory, prefix=prefix)
            ).name
        yield name


def _listen_for(peer: Peer) -> socket.socket | None:
    """Listen on that address of this host from which another host is reached."""
    family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((peer.address, peer.port))  # no packet is sent: the kernel looks up the route
        return listen(way.getsockname()[0])
    return None


class _HostProbe:
    """The process on one host that answers; after a failure it is asked nothing more.

    Args:
        entry: the host.
        launch: the command line that starts an agent; "" for ssh.
    """

    def __init__(self, entry: HostEntry, launch: str) -> None:
        self._entry, self._launch = entry, launch
        command = [sys.executable, "-m", "cellmesh.cli.doctor.host_probe"]
        self._command = command_for(launch, entry.name, command)
        self._failure: HostFailure | None = None
        self._output = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
            )
        except OSError as error:
            text = f"cannot run {self._command[0]}: {error.strerror}"
            self._failure = HostFailure(text, "install it here, or name another --launch", "")

    def look(self, question: Look) -> HostFacts | HostFailure:
        """Return the host's facts, or why there are none."""
        question = msgspec.structs.replace(question, num_ranks=self._entry.num_ranks)
        answer = self._ask(question)
        if isinstance(answer, HostFacts):
            return answer
        assert self._failure is not None
        return self._failure

    def compare_clocks(self) -> ClockOffset | None:
        """Compare the host's system clock with this host's."""
        comparison = ClockComparison()
        now = time.time()
        for _ in range(NUM_FIRST):
            answer = self._ask(ReadClock(time.time()))
            now = time.time()
            if isinstance(answer, ClockReading):
                comparison.add(answer.sent_s, answer.host_s, now)
        return comparison.over(self._entry.name, now, now)

    def reach(self, peers: Sequence[Peer], ours: Mapping[str, Peer]) -> dict[str, str]:
        """Have the host connect to the others and to this host; return the failures."""
        wanted = [peer for peer in peers if peer.name != self._entry.name]
        own = ours.get(self._entry.name)
        answer = self._ask(Reach((*wanted, own) if own is not None else tuple(wanted)))
        none = {} if own is not None else {NOTEBOOK: "there is no route between them"}
        return {**none, **answer.failures} if isinstance(answer, Reached) else {}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for file in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert file is not None
                    file.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _ask(self, question: Question) -> Answer | None:
        if self._failure is not None or self._process is None:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended, which the reading sees
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + _ANSWER_S
        while True:
            *lines, self._output = self._output.split(b"\n")
            for line in lines:
                if line.startswith(MARK.encode()):
                    answer: Answer = msgspec.json.decode(line[len(MARK) :], type=Answer)
                    return answer
            output = self._process.stdout.fileno()
            ready = wait_readable([output], max(0.0, deadline - time.monotonic()))
            data = os.read(output, 65536) if ready else b""
            self._output += data
            if not data:
                self._fail(has_ended=bool(ready))
                return None

    def _fail(self, has_ended: bool) -> None:
        assert self._process is not None
        self._log.seek(0)
        said = (self._log.read()[-2000:] or self._output).decode(errors="replace").strip()
        if has_ended:
            status = self._process.wait()
            self._failure = explain(self._entry.name, self._launch, sys.executable, status, said)
        else:
            text = f"no answer within {_ANSWER_S:.0f} s"
            self._failure = HostFailure(text, "see what the host is busy with", said)
