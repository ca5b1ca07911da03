"""Asynchronous calls and cells that wait on real ranks beside other work."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError, RankDied, RankFailure, RanksInterrupted
from tests.faults.watching import wait_until

from .conftest import Recorder, state_of

WAIT_S = 30.0


async def serve(name: str = "") -> str:
    """Wait until a cell sets the event of this name."""
    import asyncio

    import __main__

    event = vars(__main__).setdefault("waits", {})[name] = asyncio.Event()
    print(f"serving {name}")
    await event.wait()
    print(f"served {name}")
    return name


def let_go(name: str) -> None:
    import __main__

    __main__.waits[name].set()


def test_calls_end_in_any_order_and_work_goes_on_beside_them(mesh: cm.Mesh) -> None:
    first, second = mesh.submit(serve, "first"), mesh.submit(serve, "second")
    assert mesh.run(lambda: 7).list == [7] * 4
    mesh.cell("waits['second'].set()")
    assert second.result(WAIT_S).list == ["second"] * 4
    assert not first.done()
    mesh.reshape({"dp": 4})
    mesh.reshape({"dp": 2, "tp": 2})
    assert mesh.heal().failure == ""
    assert mesh.inspect("torch.ones(2)")[0].shape == (2,)
    mesh.cell("import asyncio; await asyncio.sleep(0)")
    mesh.cell("waits['first'].set()")
    assert first.result(WAIT_S).list == ["first"] * 4


def test_output_of_a_call_that_waits_is_its_own(
    mesh: cm.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = []  # the run, its ranks and their values
    monkeypatch.setattr(
        mesh.rank_set.session.metrics, "take", lambda *got: logged.append((*got[:2], got[2].verb))
    )
    source = """
    import asyncio, cellmesh
    event = asyncio.Event()
    async def inner():
        await event.wait()
        print("inner")
        cellmesh.log(waited=rank)
    task = asyncio.create_task(inner())
    print("begun")
    await task
    "value"
    """
    sink, other = Recorder(), Recorder()
    run = mesh.submit_cell(textwrap.dedent(source), sink=sink)
    mesh.submit_cell("print('beside'); event.set(); 'quiet';", sink=other).result(WAIT_S)
    run.result(WAIT_S)
    texts = [getattr(block.item, "text", "") for block in sink.blocks]
    assert [text for text in texts if text] == ["begun", "inner"]
    assert [getattr(block.item, "text", "") for block in other.blocks] == ["beside"]
    assert len(sink.blocks) == 3  # and the value
    assert {verb.names for *_, verb in logged} == {("waited",)}
    found = [(number, ranks, verb.values) for number, ranks, verb in logged]
    assert sorted(found) == [(run.number, (each,), ((each,),)) for each in range(4)]


def test_calls_and_cells_are_tasks_that_time_limits_can_end(mesh: cm.Mesh) -> None:
    async def limited() -> str:
        import asyncio

        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "over"
        return ""

    assert mesh.submit(limited).result(WAIT_S).list == ["over"] * 4
    assert mesh.run(limited).list == ["over"] * 4
    mesh.cell("import asyncio\nasync with asyncio.timeout(60): await asyncio.sleep(0)")


def test_status_and_stacks_say_which_calls_wait_and_where(mesh: cm.Mesh) -> None:
    run = mesh.submit(serve, "seen")
    mesh.run(lambda: None)
    [call] = state_of(mesh, 2).waiting
    assert (call.run, call.title) == (run.number, "serve")
    assert call.where.endswith("test_waiting_calls.py line 28")
    assert "idle\nserve, which waits:\n" in mesh.stacks()
    run.cancel()
    run.wait(WAIT_S)
    assert state_of(mesh, 2).waiting == ()


def test_cancel_reaches_one_call_as_it_waits_and_as_it_computes(mesh: cm.Mesh) -> None:
    async def wait() -> None:
        import asyncio

        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            import __main__

            __main__.was_cancelled = True
            raise

    async def spin() -> None:
        import asyncio

        await asyncio.sleep(0)
        while True:
            pass

    kept, waiting = mesh.submit(serve, "kept"), mesh.submit(wait)
    mesh.run(lambda: None)
    waiting.cancel()
    with pytest.raises(RanksInterrupted):
        waiting.result(WAIT_S)
    assert mesh.pull("was_cancelled").list == [True] * 4
    spinning = mesh.submit(spin)
    beside = mesh.submit(lambda: 8)
    spinning.cancel()
    with pytest.raises(RanksInterrupted, match="interrupted in spin"):
        spinning.result(WAIT_S)
    assert beside.result(WAIT_S).list == [8] * 4
    assert not kept.done()
    mesh.run(let_go, "kept")
    assert kept.result(WAIT_S).list == ["kept"] * 4


def test_a_failing_call_holds_back_nothing(mesh: cm.Mesh) -> None:
    async def fail() -> None:
        import asyncio

        await asyncio.sleep(0)
        if rank == 1:  # type: ignore[name-defined]  # noqa: F821
            raise ValueError("no")
        await asyncio.sleep(1000)

    run, kept = mesh.submit(fail), mesh.submit(serve, "beside")
    wait_until(lambda: run.failed_ranks() == [1])
    assert mesh.run(lambda: 9).list == [9] * 4
    assert run.waiting_ranks() == [0, 2, 3]
    run.cancel()
    run.wait(WAIT_S)
    with pytest.raises(RanksInterrupted, match="rank 1 raised ValueError"):
        run.result()
    mesh.run(let_go, "beside")
    kept.result(WAIT_S)


def test_collectives_whose_order_could_differ_are_refused(mesh: cm.Mesh) -> None:
    async def reduce() -> float:
        import asyncio

        import torch
        import torch.distributed as dist

        total = torch.ones(2)
        for _ in range(3):
            await asyncio.sleep(0)
            dist.all_reduce(total)
        return float(total[0])

    assert mesh.submit(reduce).result(WAIT_S).list == [64.0] * 4
    kept = mesh.submit(serve, "alone")
    with pytest.raises(RankFailure, match="reduce may not begin all_reduce: serve waits") as caught:
        mesh.submit(reduce).result(WAIT_S)
    assert {type(each) for each in caught.value.exceptions} == {MeshUsageError}
    mesh.cell("total = torch.ones(1); dist.all_reduce(total)")
    assert mesh.run(reduce).list == [64.0] * 4
    assert mesh.heal().healed is False
    mesh.run(let_go, "alone")
    kept.result(WAIT_S)


def test_a_death_ends_calls_on_that_rank_only_and_a_heal_keeps_the_others(mesh: cm.Mesh) -> None:
    run = mesh.submit(serve, "living")
    pid = mesh.run(os.getpid)[3]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.failed_ranks() == [3])
    assert mesh.heal().respawned == (3,)
    assert run.waiting_ranks() == [0, 1, 2]
    mesh[0:3].run(let_go, "living")
    values, errors = run.gather(WAIT_S)
    assert values == dict.fromkeys(range(3), "living")
    assert isinstance(errors[3], RankDied)


def test_a_mesh_stops_beside_calls_that_wait(own_mesh: cm.Mesh) -> None:
    run = own_mesh.submit(serve, "stopped")
    own_mesh.run(lambda: None)
    own_mesh.stop()
    assert run.wait(WAIT_S)
