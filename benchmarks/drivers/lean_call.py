"""A floor: the leanest call of cellmesh's own design that is still a call.

A controller sends a pickled function and its arguments over ZeroMQ (ipc) to an agent, which passes
them on to every rank over a socketpair. The ranks were forked with torch imported; they unpickle
function and arguments anew each time, call, and answer. The agent compares the answers as bytes and
sends one when all are there. All in Python; nothing heals, streams output, can be interrupted or
attached to.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import cloudpickle
import msgspec
import zmq

from .protocol import Counts, Sample, calls_per_s, main, measure_calls

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 1 << 16
# Runs that ranks have and have not answered: so many answers fit into a socket, and nobody blocks
# another.
_MAX_PENDING = 100
_END = b""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks are to do; all of it but the agent reads the number only."""

    number: int
    ranks: tuple[int, ...]
    pickled: bytes


class Done(msgspec.Struct, frozen=True, array_like=True):
    """That a rank has done it, with the result unless it is None."""

    number: int
    pickled: bytes


class _Pending:
    """What the agent knows of a call that not all ranks have answered."""

    __slots__ = ("answer", "num_answers", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_answers = 0
        self.answer: bytes | None = None


_ENCODER = msgspec.msgpack.Encoder()
_CALLS = msgspec.msgpack.Decoder(Call)
_ANSWERS = msgspec.msgpack.Decoder(Done)


def noop() -> None:
    """What every rank is asked to do."""


def measure(num_ranks: int, counts: Counts) -> Sample:
    """Agent and ranks are forked before the first ZeroMQ context is made: contexts do not survive a
    fork.
    """
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lean-") as directory:
        address = f"ipc://{directory}/agent"
        agent = _fork(lambda: _serve_agent(address, num_ranks))
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.connect(address)
            try:
                controller = _Controller(dealer, num_ranks)
                sample = {
                    **measure_calls(lambda: controller.result(controller.submit(noop)), counts),
                    "calls_per_s": calls_per_s(
                        lambda: controller.submit(noop), controller.result, counts
                    ),
                }
                dealer.send(_END)
            except BaseException:
                os.kill(agent, signal.SIGKILL)  # ranks end with the sockets that it had
                raise
            finally:
                os.waitpid(agent, 0)
    return sample


class _Controller:
    def __init__(self, dealer: zmq.Socket[bytes], num_ranks: int) -> None:
        self._dealer = dealer
        self._ranks = tuple(range(num_ranks))
        self._number = 0
        self._answers: dict[int, Done] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> int:
        self._number += 1
        pickled = cloudpickle.dumps((function, args))
        self._dealer.send(_ENCODER.encode(Call(self._number, self._ranks, pickled)))
        return self._number

    def result(self, number: int) -> Any:
        while number not in self._answers:
            answer = _ANSWERS.decode(self._dealer.recv())
            self._answers[answer.number] = answer
        pickled = self._answers.pop(number).pickled
        return pickle.loads(pickled) if pickled else None


def _fork(serve: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    return pid


def _serve_agent(address: str, num_ranks: int) -> None:
    ranks = []
    pids = []
    for _ in range(num_ranks):
        ours, theirs = socket.socketpair()
        ranks.append(ours)
        pids.append(_fork(lambda: _become_rank(ranks, theirs)))  # noqa: B023  (it runs before the next)
        theirs.close()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        router.bind(address)
        _relay(router, ranks)
    for rank in ranks:
        rank.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _relay(router: zmq.Socket[bytes], ranks: Sequence[socket.socket]) -> None:
    by_descriptor = {rank.fileno(): rank for rank in ranks}
    incomplete = dict.fromkeys(by_descriptor, b"")
    pending: dict[int, _Pending] = {}
    peer = b""
    poll = select.epoll()
    for descriptor in (router.fileno(), *by_descriptor):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        # ZeroMQ's descriptor shows changes only: after each use, the socket is read until it has
        # nothing.
        while len(pending) < _MAX_PENDING:
            try:
                peer, frame = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frame == _END:
                return
            number = _CALLS.decode(frame).number
            pending[number] = _Pending(number)
            data = _LENGTH.pack(len(frame)) + frame
            for rank in ranks:
                rank.sendall(data)
        for descriptor, _ in poll.poll():
            if descriptor not in by_descriptor:
                continue
            new = by_descriptor[descriptor].recv(_BUFFER_BYTES)
            if not new:
                raise RuntimeError("a rank has ended")
            data = incomplete[descriptor] + new
            at = 0
            while len(data) - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                answer, at = data[at + _LENGTH.size : end], end
                run = pending[_ANSWERS.decode(answer).number]
                run.num_answers += 1
                if run.answer is None:
                    run.answer = answer
                elif run.answer != answer:
                    raise RuntimeError("ranks have answered differently")
                if run.num_answers == len(ranks):
                    del pending[run.number]
                    router.send_multipart((peer, answer))
            incomplete[descriptor] = data[at:]


def _become_rank(others: Sequence[socket.socket], own: socket.socket) -> NoReturn:
    for other in others:  # else the agent's end would not close with the agent
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    end = 0
    while num_bytes := own.recv_into(view[end:]):
        end += num_bytes
        at = 0
        answers = []
        while end - at >= _LENGTH.size:
            start = at + _LENGTH.size
            size = _LENGTH.unpack_from(buffer, at)[0]
            if start + size > end:
                break
            at = start + size
            call = _CALLS.decode(view[start:at])
            function, args = pickle.loads(call.pickled)
            value = function(*args)
            answer = _ENCODER.encode(
                Done(call.number, b"" if value is None else pickle.dumps(value))
            )
            answers.append(_LENGTH.pack(len(answer)) + answer)
        own.sendall(b"".join(answers))
        buffer[: end - at] = buffer[at:end]
        end -= at
    os._exit(0)


if __name__ == "__main__":
    main(measure)
