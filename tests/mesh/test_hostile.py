"""Whoever reaches a socket of ours without the key gets nothing, and breaks nothing."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import cellmesh as cm
from cellmesh.wire.attach import Hello
from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.host import own_package, own_python, own_torch, own_version
from cellmesh.wire.messages import PROTOCOL, Relay, Stop
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.ticket import find_tickets, runtime_root
from cellmesh.wire.verbs import RunCell

pytestmark = pytest.mark.usefixtures("mesh")


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def agent_socket() -> Path:
    (ticket,) = find_tickets(runtime_root())
    return Path(ticket.directory) / "agent.sock"


def still_works(mesh: cm.Mesh) -> None:
    mesh.cell("t = torch.ones(1); dist.all_reduce(t)")
    assert mesh.pull("t.item()").list == [4.0] * 4


def malformed(tmp_path: Path) -> dict[str, list[bytes]]:
    bomb = pickle.dumps(Bomb(tmp_path / "went off"))
    hello = encode([Parcel(Hello(b"\0" * 32, PROTOCOL, os.getpid()))])
    relay = Relay((0, 1, 2, 3), "work", 7, 1)
    stolen = encode([Parcel(RunCell(7, "import os; os._exit(9)", "", b"", 1))])
    return {
        "random bytes": [os.urandom(200)],
        "nothing": [b""],
        "a pickle": [bomb],
        "a pickle behind a header": [msgspec.msgpack.encode([]), bomb],
        "an unknown verb": [msgspec.msgpack.encode([["Explode", 1]])],
        "a truncated header": [bytes(hello[0])[:-3]],
        "a huge declared array": [b"\xdd\xff\xff\xff\xff"],
        "a huge declared string": [b"\x91\x92\xdb\xff\xff\xff\xffabc"],
        "buffers that do not come": [msgspec.msgpack.encode([["Relay", [0], "work", 1, 2**40]])],
        "negative buffers": [msgspec.msgpack.encode([["Relay", [0], "work", 1, -1]])],
        "a wrong key": [bytes(frame) for frame in hello],
        "orders without a key": [bytes(f) for f in encode([Parcel(Stop())])],
        "work without a key": [bytes(f) for f in encode([Parcel(relay, tuple(stolen))])],
        "many frames": [b"x"] * 2000,
    }


def test_messages_without_the_key_do_nothing(mesh: cm.Mesh, tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for name, frames in malformed(tmp_path).items():
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 2000)
            dealer.connect(f"ipc://{agent_socket()}")
            for _ in range(3):
                dealer.send_multipart(frames)
            still_works(mesh)
            assert not dealer.poll(0), f"{name} was answered"
    context.term()
    still_works(mesh)
    assert not (tmp_path / "went off").exists()


def test_raw_bytes_do_nothing(mesh: cm.Mesh) -> None:
    for raw in (
        os.urandom(500),
        # A correct greeting (RFC 23, NULL mechanism), then a frame that declares 2**62 bytes.
        b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" * 32
        + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
        + b"\x02" + struct.pack(">Q", 1 << 62) + b"abc",
    ):  # fmt: skip
        for _ in range(5):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(agent_socket()))
                connection.sendall(raw)
                still_works(mesh)
    still_works(mesh)


def test_peer_that_may_not_take_the_mesh_is_refused_with_the_reason(mesh: cm.Mesh) -> None:
    version, package = own_version(), own_package()
    for changes, words in (
        ({"protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL}"),
        ({"version": "9.9.9"}, f"the mesh has {version}, this controller has 9.9.9"),
        ({"python": "2.7.18"}, f"the mesh has {own_python()}, this controller has 2.7.18"),
        ({"torch": "1.0.0"}, f"the mesh has {own_torch()}, this controller has 1.0.0"),
        ({"package": "/other/cellmesh"}, f"of {package}, and this is that of /other/cellmesh"),
        ({"steal": False}, f"held by process {os.getpid()}"),
    ):
        hello: Any = {"steal": True, **changes}
        answer = ask(msgspec.structs.replace(own_hello(), **hello))
        assert b"Refused" in answer
        assert words.encode() in answer
    wrong = msgspec.structs.replace(own_hello(), key=b"x" * 32, steal=True)
    with pytest.raises(AssertionError, match="no answer"):
        ask(wrong, patience_s=0.5)
    still_works(mesh)


def own_hello() -> Hello:
    """What a controller like this one says."""
    (ticket,) = find_tickets(runtime_root())
    key = bytes.fromhex(ticket.key)
    return Hello(
        key,
        PROTOCOL,
        os.getpid(),
        own_version(),
        own_python(),
        package=own_package(),
        torch=own_torch(),
    )


def ask(hello: Hello, patience_s: float = 10.0) -> bytes:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{agent_socket()}")
        preamble = Reliable[None]().wrap_aside()
        dealer.send_multipart([preamble, *(bytes(frame) for frame in encode([Parcel(hello)]))])
        assert dealer.poll(patience_s * 1000), "no answer"
        return dealer.recv_multipart()[1]


def test_the_store_stands_garbage_and_is_bound_to_loopback(mesh: cm.Mesh) -> None:
    port = int(mesh[0].pull("__import__('os').environ['MASTER_PORT']"))
    for raw in (os.urandom(100), b"\xff" * 100, b"\0" * 8 + struct.pack("<Q", 1 << 62)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(raw)
    mesh.cell("g = dist.new_group([0, 1, 2, 3])")
    still_works(mesh)
    listening = {
        line.split()[1].split(":")[0]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port
    }
    assert listening == {"0100007F"}


def test_user_code_that_writes_into_our_socket_costs_its_own_rank_only(own_mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure, match=r"wrote into its connection.*killed"):
        own_mesh[1].submit_cell(
            "import os, time; os.write(3, b'\\x01\\0\\0\\0\\x05' + b'\\0' * 7 + b'junk!'); "
            "time.sleep(1000)"
        ).result(timeout_s=20)
    assert own_mesh[0].run(lambda: 1) == 1
