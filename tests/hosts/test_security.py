"""Whoever reaches a mesh on many hosts without a ticket of it is refused, counted and shown."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

import cellmesh as cm
from cellmesh.controller.session.standing import ask_agents, summarize
from cellmesh.errors import NoMeshError
from cellmesh.wire.attach import Hello, Inquire
from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.curve import new_keys, use_curve
from cellmesh.wire.host import own_package, own_python, own_torch, own_version
from cellmesh.wire.hosts import ARRIVED, own_facts, parse_invitation
from cellmesh.wire.messages import PROTOCOL, Relay, Stop
from cellmesh.wire.own_file import to_json
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.ticket import Ticket, new_key, read_ticket, runtime_root
from cellmesh.wire.verbs import RunCell
from tests.conftest import LEFTOVER_S, own_runtime_dir
from tests.faults.watching import Stuck, wait_until
from tests.mesh.test_hostile import malformed

from .netns import NOTEBOOK, Host, run
from .notebook import NotebookError, here, notebook_on, on_host

WAIT_S = 60.0
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
Connect = Callable[[zmq.Socket[bytes]], None]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """Replace that of each test: the mesh is of all tests here."""


@pytest.fixture(scope="module")
def mesh(machines: list[Host]) -> Iterator[cm.Mesh]:
    with own_runtime_dir():
        with cm.start(hosts="cm1:1,cm2:1", lease_s=60, name="kept") as mesh:
            mesh.cell("count = 0")
            yield mesh
        assert not list(runtime_root().glob("*"))
    for host in machines:
        _, left = psutil.wait_procs(host.meshes(), timeout=LEFTOVER_S)
        assert not left
        assert not list(host.directory.glob("run/cellmesh/*"))


def ticket_of(name: str = "kept") -> Ticket:
    return read_ticket(runtime_root() / name / "ticket.json")


def num_refused(name: str = "kept") -> int:
    holder = summarize(ask_agents(ticket_of(name)))
    assert holder is not None
    return holder.num_refused


def still_works(mesh: cm.Mesh) -> None:
    mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("(t.item(), count)").list == [(2.0, 0)] * 2


def wait_for_refusals(before: int, number: int = 1) -> None:
    wait_until(lambda: num_refused() >= before + number, WAIT_S, f"{number} refusals are counted")


def address_of(ticket: Ticket, index: int = 0) -> tuple[str, int]:
    host, _, port = ticket.agents[index].endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def hello(ticket: Ticket, key: str = "", **fields: Any) -> list[bytes]:
    verb = Hello(
        bytes.fromhex(key or ticket.key),
        PROTOCOL,
        os.getpid(),
        own_version(),
        own_python(),
        package=own_package(),
        torch=own_torch(),
        **fields,
    )
    return [Reliable[None]().wrap_aside(), *map(bytes, encode([Parcel(verb)]))]


def orders() -> list[list[bytes]]:
    """What a controller says: a greeting, a cell, and the end of the mesh."""
    cell = Parcel(
        Relay((0, 1), "work", 7, 1),
        tuple(encode([Parcel(RunCell(7, "count += 1", "", b"", 1))])),
    )
    sent: Reliable[None] = Reliable()
    return [
        hello(ticket_of(), steal=True),
        *([sent.wrap(None, 0), *map(bytes, encode([each]))] for each in (cell, Parcel(Stop()))),
    ]


@contextlib.contextmanager
def peer(endpoint: str, prepare: Connect) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        prepare(dealer)
        dealer.connect(endpoint)
        yield dealer


def without_keys(dealer: zmq.Socket[bytes]) -> None:
    """ZeroMQ's NULL mechanism."""


def with_a_password(dealer: zmq.Socket[bytes]) -> None:
    dealer.setsockopt(zmq.PLAIN_USERNAME, b"root")
    dealer.setsockopt(zmq.PLAIN_PASSWORD, b"secret")


def with_the_agents_key(dealer: zmq.Socket[bytes]) -> None:
    """The agent's public key is known, as it is no secret; the own one is on no list."""
    use_curve(dealer, new_keys().secret, ticket_of().agents[0].public_key)


def with_another_agents_key(dealer: zmq.Socket[bytes]) -> None:
    use_curve(dealer, ticket_of().curve_secret, new_keys().public)


@pytest.mark.parametrize(
    "prepare", [without_keys, with_a_password, with_the_agents_key, with_another_agents_key]
)
def test_peer_without_a_key_of_the_mesh_is_refused_and_counted(
    prepare: Connect, mesh: cm.Mesh
) -> None:
    before = num_refused()
    with peer(ticket_of().agents[0].endpoint, prepare) as dealer:
        with contextlib.suppress(zmq.Again):  # it has been refused, and ZeroMQ connects no more
            for frames in orders():
                dealer.send_multipart(frames, zmq.NOBLOCK)
        wait_for_refusals(before)
        assert not dealer.poll(0), "it was answered"
    still_works(mesh)


def test_peer_with_curve_but_without_the_mesh_key_is_refused(mesh: cm.Mesh) -> None:
    before = num_refused()
    ticket = ticket_of()

    with peer(ticket.agents[0].endpoint, holding(ticket)) as dealer:
        dealer.send_multipart(hello(ticket, new_key(), steal=True))
        ask = encode([Parcel(Inquire(b"x" * 32, ends=True))])
        dealer.send_multipart([Reliable[None]().wrap_aside(), *map(bytes, ask)])
        wait_for_refusals(before, 2)
        assert not dealer.poll(0), "it was answered"
    still_works(mesh)


CURVE = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00CURVE" + b"\0" * 47


def test_raw_bytes_on_the_port_are_refused_and_counted(mesh: cm.Mesh) -> None:
    """Nothing, a pickle, noise, and a command of ZMTP's that is said to be huge."""
    for raw in (
        b"",
        pickle.dumps({"a": 1}),
        CURVE + os.urandom(300),
        CURVE + b"\x06" + struct.pack(">Q", 1 << 62),
    ):
        before = num_refused()
        with socket.create_connection(address_of(ticket_of())) as connection:
            connection.sendall(raw)
        wait_for_refusals(before)
    still_works(mesh)


def test_connections_that_say_nothing_are_closed_and_cost_nothing(mesh: cm.Mesh) -> None:
    """A port scanner, and half-open connections in numbers."""
    before = num_refused()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address_of(ticket_of())))
            for _ in range(300)
        ]
        still_works(mesh)
        for connection in silent:
            connection.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1000):  # the agent's greeting, then its end
                    pass
    wait_for_refusals(before, 300)
    still_works(mesh)


def test_process_on_another_host_without_a_ticket_is_refused(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    """It has found the agents' addresses and public keys, and makes the rest up."""
    before = num_refused()
    forged = msgspec.structs.replace(
        ticket_of(),
        key=new_key(),
        curve_secret=new_keys().secret,
        directory=str(machines[3].directory / "run/cellmesh/kept"),
    )
    path = machines[3].directory / "forged.json"
    write_to(path, forged)
    source = f"cm.attach({str(path)!r}, steal=True)"
    refused = pytest.raises(NotebookError, match="NoMeshError: no host of kept answers")
    with notebook_on(machines[3]) as notebook, refused:
        notebook.run(source)
    wait_for_refusals(before)
    still_works(mesh)


def test_refusals_are_shown_on_the_host_of_the_notebook_and_of_the_agent(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    before = num_refused()
    with socket.create_connection(address_of(ticket_of())) as connection:
        connection.sendall(b"hello")
    wait_for_refusals(before)
    assert "kept has refused" in here("ps").stderr
    assert json.loads(here("ps", "--json").stdout)[0]["num_refused"] > before

    def is_shown() -> bool:
        return "kept has refused" in on_host(machines[0], "ps").stderr

    wait_until(is_shown, WAIT_S, "cm1 shows it")


# ---- bytes and tickets that were stolen


class Recorder:
    """Forwards a TCP connection to an agent, and keeps what the client has sent."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = b""
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._target) as agent:
            while True:
                ready, _, _ = select.select([client, agent], [], [])
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    (agent if one is client else client).sendall(data)
                    self.sent += data if one is client else b""

    def close(self) -> None:
        self._listener.close()
        self._thread.join(WAIT_S)


def test_replayed_bytes_of_a_controller_are_refused(mesh: cm.Mesh) -> None:
    """All that a process with the ticket has sent, from its greeting to its order."""
    ticket = ticket_of()
    recorder = Recorder(address_of(ticket))
    agent = msgspec.structs.replace(ticket.agents[0], endpoint=recorder.endpoint)
    through = msgspec.structs.replace(ticket, agents=(agent,))
    assert ask_agents(through)[0].standing is not None
    recorder.close()
    assert b"CURVE" in recorder.sent
    before = num_refused()
    with socket.create_connection(address_of(ticket)) as connection:
        connection.settimeout(WAIT_S)
        connection.sendall(recorder.sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):
                pass
    wait_for_refusals(before)
    still_works(mesh)


def test_stolen_ticket_is_worth_nothing_after_the_stop(machines: list[Host], mesh: cm.Mesh) -> None:
    with cm.start(hosts="cm3:1", name="first", lease_s=60):
        stolen = ticket_of("first")
    path = machines[3].directory / "stolen.json"
    write_to(path, stolen)
    with pytest.raises(NoMeshError, match="no host of first answers"):
        cm.attach(str(path), steal=True)
    # On another mesh, whose addresses and public keys are known, its keys open nothing either.
    before = num_refused()
    write_to(path, msgspec.structs.replace(stolen, agents=ticket_of().agents))
    with pytest.raises(NoMeshError, match="no host of first answers"):
        cm.attach(str(path), steal=True)
    wait_for_refusals(before)
    still_works(mesh)


def write_to(path: Path, ticket: Ticket) -> None:
    path.write_bytes(to_json(ticket))
    path.chmod(0o600)


# ---- other users, other files


def test_other_user_of_a_host_reaches_nothing(mesh: cm.Mesh, machines: list[Host]) -> None:
    """Of the notebook's host and of an agent's: files, processes and sockets."""
    host = machines[0]
    (own,) = (host.directory / "run/cellmesh").glob("*/ticket.json")
    (agent,) = [p for p in host.processes() if p.name() == "cellmesh-agent"]
    rank = mesh[0].pull("__import__('os').getpid()")
    before = num_refused()
    address, port = address_of(ticket_of())
    script = f"""
import os, signal, socket
def attempt(what, *arguments):
    try:
        what(*arguments)
    except (PermissionError, FileNotFoundError, ProcessLookupError) as error:
        return
    print("could", what, arguments)
for path in {[str(own), str(own.parent), str(ticket_of().path), str(ticket_of().path.parent)]}:
    attempt(os.open, path, os.O_RDONLY)
    attempt(os.listdir, path if os.path.isdir(path) else os.path.dirname(path))
    attempt(os.unlink, path)
for pid in {[agent.pid, rank]}:
    for name in ("environ", "mem", "maps"):
        attempt(open, f"/proc/{{pid}}/{{name}}", "rb")
    attempt(os.listdir, f"/proc/{{pid}}/fd")
    attempt(os.kill, pid, signal.SIGTERM)
with socket.create_connection(({address!r}, {port})) as connection:
    connection.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48))
    while connection.recv(1000): pass
print("as", os.getuid())
"""
    said = host.inside(*NOBODY, "/usr/bin/python3", "-c", script)
    assert said == "as 65534\n"
    wait_for_refusals(before)
    still_works(mesh)


def test_other_user_of_the_notebook_host_cannot_connect_to_a_local_mesh(
    runtime_dir: Path,
) -> None:
    with cm.start(1, name="near") as near:
        path = runtime_root() / "near/agent.sock"
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
        done = subprocess.run([*NOBODY, "/usr/bin/python3", "-c", script], capture_output=True)
        assert b"PermissionError" in done.stderr
        assert near.run(abs, -1).list == [1]


def test_tickets_and_sockets_belong_to_their_user_alone(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    roots = [runtime_root(), *(host.directory / "run/cellmesh" for host in machines[:2])]
    for root in roots:
        (directory,) = root.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for path in [*directory.glob("*.json"), *directory.glob("*.sock")]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        sockets = [each for each in directory.rglob("*") if stat.S_ISSOCK(each.stat().st_mode)]
        # Of commands on the notebook's host; agents have none.
        assert [each.name for each in sockets] == ["guest.sock"] * (root == runtime_root())


def test_keys_are_in_no_argument_environment_log_or_output(
    mesh: cm.Mesh, machines: list[Host], capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [ticket_of().path]
    for host in machines[:2]:
        paths += (host.directory / "run/cellmesh").glob("*/ticket.json")
    tickets = [read_ticket(path) for path in paths]
    secrets = {ticket.key for ticket in tickets} | {ticket.curve_secret for ticket in tickets}
    assert len(secrets) == 4  # one of the mesh, and one of each side for CURVE
    texts = [str(mesh.run(lambda: dict(os.environ)).list), *map(repr, tickets)]
    with pytest.raises(cm.RankFailure) as failure:
        mesh.cell("1 / 0")
    texts += [str(failure.value), *capfd.readouterr()]
    processes = [p for host in machines[:2] for p in host.processes()]
    for process in [*processes, *psutil.Process().children(recursive=True)]:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has just ended
                texts.append(Path(f"/proc/{process.pid}/{name}").read_text(errors="replace"))
    for path in paths:
        texts += [log.read_text(errors="replace") for log in path.parent.glob("logs/*")]
    assert not [text for text in texts if any(secret in text for secret in secrets)]


# ---- the listener of hosts that announce themselves


def test_listener_for_hosts_lets_in_nobody_without_the_invitation(
    machines: list[Host], mesh: cm.Mesh
) -> None:
    options = {"launch": "hand", "nodes": 1, "nproc_per_host": 1, "address": NOTEBOOK}
    path = runtime_root() / "open/join.json"
    with ThreadPoolExecutor(1) as pool:
        starts = pool.submit(cm.start, **options, name="open", lease_s=60, timeout_s=WAIT_S)  # type: ignore[arg-type]
        wait_until(lambda: path.exists() and path.stat().st_size, WAIT_S, "the invitation")
        invitation = parse_invitation(path.read_bytes())
        assert invitation is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert invitation.secret not in repr(invitation)
        assert own_listeners() == {NOTEBOOK}
        arrival = [ARRIVED, msgspec.json.encode(own_facts({}))]
        for key, secret in (
            (None, ""),
            (invitation.public_key, new_keys().secret),
            (new_keys().public, invitation.secret),
        ):
            prepare = without_keys if key is None else keyed(secret, key)
            with peer(invitation.endpoint, prepare) as dealer:
                dealer.send_multipart(arrival)
                assert not dealer.poll(500)
        host, _, port = invitation.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(os.urandom(500))

        def is_counted() -> bool:
            rows = {row["name"]: row for row in json.loads(here("ps", "--json").stdout)}
            return rows["open"]["state"] == "starting" and rows["open"]["num_refused"] >= 4

        wait_until(is_counted, WAIT_S, "four strangers are counted")
        agent = machines[3].start(sys.executable, "-m", "cellmesh", "agent", "--ticket", str(path))
        with starts.result() as opened:
            assert opened.pull("rank").list == [0]
            wait_for_documented(machines, "the notebook")
        agent.wait(WAIT_S)
    assert not own_listeners()
    still_works(mesh)


def keyed(secret: str, server: str) -> Connect:
    def prepare(dealer: zmq.Socket[bytes]) -> None:
        use_curve(dealer, secret, server)

    return prepare


def own_listeners() -> set[str]:
    """The addresses on which this process listens, as a notebook does."""
    lines = subprocess.run(["ss", "-Htulnp"], capture_output=True, text=True).stdout.splitlines()
    own = f"pid={os.getpid()},"
    return {line.split()[4].rpartition(":")[0] for line in lines if own in line}


# ---- what listens


Listener = tuple[str, str, str]  # process, protocol, whose address
SECURITY = Path(__file__).parents[2] / "docs/security.md"


def documented(*others: str) -> set[Listener]:
    """Return the rows of the first table of what listens: of each host, and of some others."""
    section = SECURITY.read_text().partition("\n## What listens\n")[2]
    table = section.partition("\n| process |")[2].partition("\n\n")[0]
    row = r"^\| `([^`]+)`.*? \| (\w+).*? \| ([^,|]+?)(?:,.*?)? \| "
    rows = re.findall(row, table, re.MULTILINE)
    assert len(rows) == table.count("\n") - 1
    return {each for each in rows if each[2] == "the host's" or each[0] in others}


def what_listens(machines: list[Host]) -> set[Listener]:
    """Return what listens on the hosts, and what does of this process and its children."""
    found = set()
    for host in machines:
        for name, protocol, address, _ in sockets(host.inside("ss", "-Htulnp")):
            if name != "sshd":
                name = re.sub(r"-r\d+$", "-rN", name)
                found.add((name, protocol, "the host's" if address == host.address else address))
    own = {each.pid for each in psutil.Process().children(recursive=True)}
    for name, protocol, address, pid in sockets(run("ss", "-Htulnp")):
        if pid in own or pid == os.getpid():
            name = name if pid in own else "the notebook"
            found.add((name, protocol, "the notebook's" if address == NOTEBOOK else address))
    return found


def wait_for_documented(machines: list[Host], *others: str) -> None:
    """Wait until exactly the documented sockets listen: `ss` does not name the owner of a socket
    while that ends, names a process that was just forked as the one that forked it, and sees the
    last mesh's ssh until that has ended.
    """
    expected, found = documented(*others), set[Listener]()

    def is_as_documented() -> bool:
        nonlocal found
        found = what_listens(machines)
        return found == expected

    try:
        wait_until(is_as_documented, WAIT_S / 2, "what listens is as documented")
    except Stuck as error:
        differs = f"undocumented: {found - expected}, missing: {expected - found}"
        raise Stuck(f"{error}; {differs}") from None


def sockets(lines: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield process, protocol, address and pid of each line of ``ss -Htulnp``."""
    for line in lines.splitlines():
        fields = line.split()
        for name, pid in re.findall(r'"([^"]+)",pid=(\d+)', line):
            yield name, fields[0].upper(), fields[4].rpartition(":")[0], int(pid)


def test_what_listens_is_what_is_documented(mesh: cm.Mesh, machines: list[Host]) -> None:
    wait_for_documented(machines)
    stores = [host.name for host in machines if "cellmesh-store" in host.inside("ss", "-Htlnp")]
    assert stores == ["cm1"]
    for host in machines[:2]:
        pids = {f"pid={process.pid}," for process in host.meshes()}
        named = [
            line
            for line in host.inside("ss", "-Hxlp").splitlines()
            if any(pid in line for pid in pids) and "@" not in line.split()[4][:1]
        ]
        assert not [line for line in named if line.split()[4] != "*"], named


def test_what_listens_behind_a_firewall_is_what_is_documented(
    mesh: cm.Mesh, machines: list[Host]
) -> None:
    """ssh forwards."""
    host = machines[2]
    host.close_ports()
    try:
        with cm.start(hosts="cm3:1", lease_s=60):
            wait_for_documented(machines, "ssh")
    finally:
        host.mend()
    wait_for_documented(machines)


# ---- peers that are authenticated, and hostile


def holding(ticket: Ticket) -> Connect:
    """Return what makes a peer one that has the ticket."""
    return keyed(ticket.curve_secret, ticket.agents[0].public_key)


def noise(frames: Sequence[bytes], chance: random.Random) -> list[bytes]:
    """Change some bytes of one frame."""
    changed = [bytearray(frame) for frame in frames]
    where = chance.choice(changed)
    for _ in range(chance.randrange(1, 4)):
        where[chance.randrange(len(where))] = chance.randrange(256)
    return [bytes(frame) for frame in changed]


def wait_for_answer(dealer: zmq.Socket[bytes], ticket: Ticket) -> None:
    """Ask the agent how the mesh stands, which says that it has read all that came before."""
    ask = encode([Parcel(Inquire(bytes.fromhex(ticket.key)))])
    dealer.send_multipart([Reliable[None]().wrap_aside(), *map(bytes, ask)])
    while True:
        assert dealer.poll(WAIT_S * 1000), "no answer"
        if any(b"Standing" in frame for frame in dealer.recv_multipart()):
            return


def test_hostile_controller_cannot_break_the_agent(
    machines: list[Host], mesh: cm.Mesh, tmp_path: Path
) -> None:
    """It has taken the mesh over, and then sends what no controller does."""
    with cm.start(hosts="cm3:1", name="taken", lease_s=60) as taken:
        taken.cell("kept = 7")
        ticket, chance = ticket_of("taken"), random.Random(7)
        with peer(ticket.agents[0].endpoint, holding(ticket)) as dealer:
            dealer.send_multipart(hello(ticket, steal=True, link=b"hostile", host="evil"))
            number = 0
            for name, frames in malformed(tmp_path).items():
                if name.endswith("without a key"):  # which are sound ones of a controller
                    continue
                number += 1
                dealer.send_multipart([struct.pack("<QQ", number, 0), *frames])
                dealer.send_multipart([struct.pack("<QQ", number, 1 << 60), *frames])
            for _ in range(300):
                number += 1
                read = encode([Parcel(Relay((0,), "control", -1, 1), (b"\x90",))])
                said = noise([bytes(frame) for frame in read], chance)
                dealer.send_multipart([struct.pack("<QQ", number, 0), *said])
            wait_for_answer(dealer, ticket)
        with cm.attach("taken", steal=True) as again:
            assert again[0].pull("kept") == 7
    assert not (tmp_path / "went off").exists()
