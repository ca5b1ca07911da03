"""A floor: bare ZeroMQ from a controller over one agent to the ranks and back, over ipc.

A call is one byte down, which the agent passes to every rank, and one byte up when all ranks have
answered. Nothing is encoded, checked, run or remembered.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import zmq

from .protocol import Counts, Sample, calls_per_s, main, measure_calls

_WORK = b"w"
_END = b"e"


def measure(num_ranks: int, counts: Counts) -> Sample:
    """All processes are forked before the first ZeroMQ context is made: contexts do not survive a
    fork.
    """
    with tempfile.TemporaryDirectory(prefix="hop-") as directory:
        up, down = f"ipc://{directory}/up", f"ipc://{directory}/down"
        agent = _fork(lambda: _serve_agent(up, down, num_ranks))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PAIR)
        socket.bind(up)
        socket.recv()  # all ranks are there

        def call() -> None:
            socket.send(_WORK)
            socket.recv()

        sample = {
            **measure_calls(call, counts),
            "calls_per_s": calls_per_s(lambda: socket.send(_WORK), lambda _: socket.recv(), counts),
        }
        socket.send(_END)
        os.waitpid(agent, 0)
        socket.close()
        context.term()
    return sample


def _fork(serve: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    return pid


def _serve_agent(up: str, down: str, num_ranks: int) -> None:
    ranks = [_fork(lambda: _serve_rank(down)) for _ in range(num_ranks)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    below = context.socket(zmq.ROUTER)
    below.bind(down)
    above = context.socket(zmq.PAIR)
    above.connect(up)
    identities = [below.recv_multipart()[0] for _ in ranks]
    above.send(_WORK)
    poller = zmq.Poller()
    poller.register(above, zmq.POLLIN)
    poller.register(below, zmq.POLLIN)
    num_answers = 0
    word = _WORK
    while word != _END:
        for socket, _ in poller.poll():
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                if socket is above:
                    word = above.recv()
                    for identity in identities:
                        below.send(identity, zmq.SNDMORE)
                        below.send(word)
                else:
                    below.recv_multipart()
                    num_answers += 1
                    if num_answers % num_ranks == 0:
                        above.send(_WORK)
    for pid in ranks:
        os.waitpid(pid, 0)
    context.destroy()


def _serve_rank(down: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(down)
    socket.send(_WORK)
    while socket.recv() != _END:
        socket.send(_WORK)
    context.destroy(linger=0)


if __name__ == "__main__":
    main(measure)
