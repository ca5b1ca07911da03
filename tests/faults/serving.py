"""An actor that serves on every rank while a fault strikes, and calls between ranks that wait."""

from __future__ import annotations

from typing import Any

import pytest

import cellmesh as cm

from .rig import NUM_RANKS, Rig
from .watching import wait_until

ANSWER_S = 40.0


class Server:
    """What each rank has."""

    def __init__(self) -> None:
        import asyncio

        self.queue: Any = asyncio.Queue()
        self.may_answer = asyncio.Event()

    async def serve(self) -> int:
        total = 0
        while number := await self.queue.get():
            total += number
        return total

    def put(self, number: int) -> None:
        self.queue.put_nowait(number)

    async def answer(self, caller: int) -> str:
        await self.may_answer.wait()
        return f"to {caller}"

    async def ask(self, peer: Any, caller: int) -> str:
        answer: str = await peer.answer(caller)
        return answer

    def let_answer(self) -> None:
        self.may_answer.set()


class Serving:
    """The calls of one cell of the table: on each rank one that serves, and one that waits for the
    next rank's answer.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._server: Any = rig.mesh.spawn(Server)
        ranks = range(NUM_RANKS)
        self._loops = [self._server[rank].serve.submit() for rank in ranks]
        self._asks = [
            self._server[rank].ask.submit(self._server[(rank + 1) % NUM_RANKS], rank)
            for rank in ranks
        ]
        wait_until(self._all_wait, ANSWER_S, "calls wait on all ranks")

    def _all_wait(self) -> bool:
        states = self._rig.mesh.states()
        titles = {rank: [call.title for call in state.waiting] for rank, state in states.items()}
        wanted = ["server.answer", "server.ask", "server.serve"]
        return len(titles) == NUM_RANKS and all(sorted(each) == wanted for each in titles.values())

    def check(self, dead: int | None, within_s: float) -> None:
        """After the fault: only calls on a dead rank, and that of the rank that waits for it, have
        ended.
        """
        if dead is not None:
            ended = [self._loops[dead], self._asks[dead], self._asks[dead - 1]]
            wait_until(lambda: all(run.done() for run in ended), within_s, "ends of waiting calls")
            for run in ended:
                with pytest.raises((cm.RankDied, cm.RankFailure), match=f"rank {dead}"):
                    run.result(timeout_s=ANSWER_S)
        self._living = [rank for rank in range(NUM_RANKS) if rank != dead]
        assert not any(self._loops[rank].done() for rank in self._living)

    def end(self, dead: int | None) -> None:
        """After the heal: what has waited goes on, with what comes now."""
        ranks = self._server[self._living]
        for number in (1, 2, 0):
            ranks.put(number)
        ranks.let_answer()
        for rank in self._living:
            assert self._loops[rank].result(timeout_s=ANSWER_S) == 3
            if dead not in (rank, (rank + 1) % NUM_RANKS):
                assert self._asks[rank].result(timeout_s=ANSWER_S) == f"to {rank}"
        self._rig.mesh.drop(self._server)
        states = self._rig.mesh.states()
        assert not any(state.waiting for state in states.values()), states
