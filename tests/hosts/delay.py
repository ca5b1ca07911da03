"""Delays what a host sends and receives by TCP: a proxy in the host's network, as the kernel may
have no netem. Run as a program, it is that proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

from .netns import NETWORK, Host

_PORT = 9
# What the proxy itself sends carries this mark, by which it is not redirected again.
_MARK = 7
_SO_ORIGINAL_DST = 80
_CHUNK_BYTES = 65536


@contextlib.contextmanager
def delayed(host: Host, delay_s: float) -> Iterator[None]:
    """Delay all TCP connections of a host that are made within the context, each way."""
    command = ("ip", "netns", "exec", host.name, sys.executable, "-m", __name__, str(delay_s))
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == b"ready\n"
        away = f"ip daddr {NETWORK}.0/24 ip daddr != {host.address}"
        for rule in (
            "table ip late",
            "chain ip late in { type nat hook prerouting priority -100; }",
            "chain ip late out { type nat hook output priority -100; }",
            f"rule ip late in iif eth0 meta l4proto tcp redirect to :{_PORT}",
            f"rule ip late out meta mark != {_MARK} {away} meta l4proto tcp redirect to :{_PORT}",
        ):
            host.inside("nft", "add", *rule.split(" ", 1))
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            host.inside("nft", "delete", "table", "ip", "late")
        proxy.kill()
        proxy.wait()
        if proxy.stdout is not None:
            proxy.stdout.close()


async def _serve(delay_s: float) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected: socket.socket = writer.get_extra_info("socket")
        asked = connected.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
        port, address = struct.unpack("!2xH4s8x", asked)
        beyond = socket.socket()
        beyond.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
        beyond.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(beyond, (socket.inet_ntoa(address), port))
            far_reader, far_writer = await asyncio.open_connection(sock=beyond)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer, delay_s), _copy(far_reader, writer, delay_s))

    server = await asyncio.start_server(pass_on, "0.0.0.0", _PORT)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def read() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                waiting.put_nowait((loop.time() + delay_s, data))
        waiting.put_nowait((loop.time() + delay_s, b""))

    reading = asyncio.create_task(read())
    with contextlib.suppress(OSError):
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()
    await reading


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
