"""What an agent keeps while nobody listens, and what the next controller is told."""

from __future__ import annotations

from typing import Any

import pytest

from cellmesh.errors import HostError
from cellmesh.wire import payload
from cellmesh.wire.attach import RunInfo
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import (
    Died,
    Done,
    Failed,
    MeshReady,
    Pickled,
    Progress,
    Ranked,
    Relay,
    StoreDied,
    StoreUp,
)
from cellmesh.wire.status import HostReport, RankState
from cellmesh.wire.verbs import Bar, Output, Skipped
from cellmesh.workers.agent.spool import Spool, Visit

STATE = Parcel(MeshReady(()))


def say(ranks: tuple[int, ...], verb: Any, *buffers: bytes) -> Parcel[Any]:
    return Parcel(Ranked(ranks, verb), buffers)


def printed(text: str, run: int = 1, rank: int = 0) -> Parcel[Any]:
    return say((rank,), Output(run, "stdout", text))


def begin(spool: Spool, run: int, *ranks: int, title: str = "cell", count: int = 3) -> None:
    spool.begin(Relay(ranks, "work", run, 1, title, count))


def attend_again(spool: Spool, *deaths: Died) -> list[Parcel[Any]]:
    """Return the messages that the next controller gets."""
    spool.leave([])
    spool.attend(STATE, deaths)
    return take_all(spool)


def attended(**limits: int) -> Spool:
    """A spool to whose agent somebody has attached."""
    spool = Spool(**limits)
    spool.attend(STATE, [])
    assert take_all(spool) == [STATE]
    return spool


def take_all(spool: Spool) -> list[Parcel[Any]]:
    taken: list[Parcel[Any]] = []
    while spool:
        taken += spool.take()
    return taken


def test_oldest_output_is_dropped_and_its_place_is_marked() -> None:
    spool = attended(max_output_bytes=30)
    begin(spool, 1, 0, 1)
    kept = [say((1,), Done(1)), printed("abcdefghij\n"), printed("ABCDEFGHIJ\n")]
    spool.add([printed("0123456789\n"), *kept])
    assert take_all(spool) == [say((0,), Skipped(1, 1, 11)), *kept]
    for _ in range(2):  # there is room again
        spool.add([printed("0123456789\n")])
        assert take_all(spool) == [printed("0123456789\n")]


def test_answers_to_questions_and_progress_are_not_kept_while_detached() -> None:
    spool = attended()
    begin(spool, 1, 0)
    spool.leave([])
    died = Parcel(Died(1, "was killed", ""))
    lasting = [printed("x\n"), died, Parcel(StoreDied("ended", 5)), Parcel(StoreUp(5))]
    state = say((0,), RankState(7, 1, 1, 1, "f", "", "cpu", 0))
    spool.add([Parcel(Progress("x", 1)), state, Parcel(HostReport(3, ())), *lasting, STATE])
    assert take_all(spool) == lasting


def test_unacknowledged_messages_are_repeated_first() -> None:
    spool = attended()
    begin(spool, 1, 0, 1)
    spool.add([printed("third\n")])
    spool.leave([[printed("first\n")], [printed("second\n"), Parcel(Progress("x", 1))]])
    spool.add([printed("fourth\n")])
    spool.attend(STATE, [])
    assert take_all(spool) == [STATE, *map(printed, ("first\n", "second\n", "third\n", "fourth\n"))]


# ---- runs in flight


def test_a_run_is_in_flight_until_every_answer_has_been_taken_in() -> None:
    spool = attended()
    begin(spool, 4, 0, 1, title="cell 2", count=2)
    info = RunInfo(4, (0, 1), "cell 2", 2)
    assert spool.runs() == (info,)
    spool.acked([say((0,), Done(4))])
    assert spool.runs() == (info,)
    spool.acked([say((1,), Failed(4, "E", "", "", 0))])
    assert spool.runs() == ()
    assert spool.next_run == 5


def test_attaching_controller_gets_a_run_whole() -> None:
    spool = attended()
    begin(spool, 4, 0, 1, 2)
    value = say((0,), Done(4, Pickled(b"v", 1)), b"buffer")
    spool.acked([value, printed("old\n", 4)])
    spool.leave([])
    spool.add([printed("missed\n", 4), say((1,), Done(4))])
    spool.attend(STATE, [])
    assert [info.run for info in spool.runs()] == [4]
    assert take_all(spool) == [value, STATE, printed("missed\n", 4), say((1,), Done(4))]
    # and the next one as well
    spool.acked([value, STATE, say((1,), Done(4))])
    assert attend_again(spool) == [value, say((1,), Done(4)), STATE]
    spool.acked([value, say((1,), Done(4)), say((2,), Done(4))])
    assert spool.runs() == ()


def test_death_follows_the_answers_of_its_rank() -> None:
    spool = attended()
    begin(spool, 4, 0, 1)
    begin(spool, 5, 0, 1)
    died = Died(1, "was killed", "words")
    spool.acked([say((1,), Done(4)), Parcel(died)])
    assert attend_again(spool, died) == [say((1,), Done(4)), STATE, Parcel(died)]


def test_control_threads_and_recoveries_have_no_runs_for_others() -> None:
    spool = attended()
    spool.begin(Relay((0,), "control", 7, 1))
    begin(spool, 1 << 40, 0)
    spool.begin(Relay((0,), "work", -1, 1))
    assert (spool.runs(), spool.next_run) == ((), 8)
    spool.leave([])
    spool.add([say((0,), Done(7)), say((0,), Done(1 << 40))])
    assert not spool


# ---- large values


def large(run: int, num_bytes: int) -> Parcel[Any]:
    return say((0,), Done(run, Pickled(b"v", 1)), b"x" * num_bytes)


def test_values_too_large_to_keep_raise_when_loaded() -> None:
    spool = Spool(max_answer_bytes=100_000)
    for run in (1, 2, 3):
        begin(spool, run, 0)
    spool.leave([[large(1, 90_000)]])
    spool.add([large(2, 20_000), large(3, 1_000)])
    kept, lost, small = take_all(spool)
    assert (kept, small) == (large(1, 90_000), large(3, 1_000))
    assert lost.buffers == ()
    with pytest.raises(HostError, match=r"was 0 MB, too much to keep .* ask for the value again"):
        payload.loads(lost.verb.verb.payload, ())


def test_a_rank_is_ahead_while_too_much_of_it_waits() -> None:
    spool = attended(max_answer_bytes=10_000)
    begin(spool, 9, 0)
    spool.add([large(9, 20_000), say((1,), Output(9, "stdout", "x" * 20_000))])
    assert spool.ahead == {0}
    spool.acked(take_all(spool))
    assert spool.ahead == set()
    spool.add([large(9, 20_000)])
    spool.leave([])
    assert spool.ahead == set(), "what is too large to keep does not wait"


def test_answers_that_wait_for_those_of_other_ranks_are_kept_without_large_values() -> None:
    """They make no rank ahead: another rank may wait for it, of a run that it has not begun."""
    spool = attended(max_answer_bytes=50_000)
    for run, num_bytes in ((1, 1_000), (2, 60_000)):
        begin(spool, run, 0, 1)
        spool.acked([large(run, num_bytes)])
    assert spool.ahead == set()
    small, lost, state = attend_again(spool)
    assert (small, state) == (large(1, 1_000), STATE)
    assert lost.buffers == ()


def test_an_exception_that_is_too_large_keeps_its_text() -> None:
    spool = Spool(max_answer_bytes=10)
    begin(spool, 1, 0)
    spool.leave([])
    spool.add([say((0,), Failed(1, "ValueError", "no", "", 3, Pickled(b"x" * 20_000)))])
    (kept,) = take_all(spool)
    assert (kept.verb.verb.payload, kept.verb.verb.text) == (None, "no")


# ---- progress bars


def bar(done: float) -> Parcel[Any]:
    return say((0,), Bar(1, 1, "t", done, 100.0, 1.0, state="open"))


def test_bars_are_output_and_not_kept_while_detached() -> None:
    spool = attended()
    bars = [bar(1), printed("below"), bar(2)]
    spool.add(bars)
    assert take_all(spool) == bars
    spool.leave([bars])
    spool.add([bar(3)])
    assert take_all(spool) == [printed("below")]


def test_a_visit_keeps_the_output_of_earlier_runs_for_the_next_controller() -> None:
    visit = Visit(first_run=5)
    failed = Failed(4, "ValueError", "bad", "the traceback\n", 1)
    own = [printed("mine\n", run=5), say((0,), Done(4)), say((0,), Done(5))]
    answers = [own[1], say((0,), failed), *own[2:]]
    passed = visit.divide([printed("theirs\n", run=4), printed("a thread\n", run=-1), own[0]])
    assert [*passed, *visit.divide(answers)] == [own[0], *answers]
    assert [parcel.verb.verb for parcel in visit.take()] == [
        Output(4, "stdout", "theirs\n"),
        Output(-1, "stdout", "a thread\n"),
        Output(4, "stderr", "the traceback\n"),
    ]
    assert visit.take() == []


def test_output_of_a_script_waits_for_its_controller_and_is_bounded_without_one() -> None:
    spool = attended(max_output_bytes=1000, max_answer_bytes=3000)
    spool.begin(Relay((0,), "work", 1, 1, is_whole=True))
    spool.add([printed(str(n) * 1000) for n in range(3)])
    assert not spool.ahead
    spool.add([printed("3" * 1000)])
    assert spool.ahead == {0}  # is not read
    assert [parcel.verb.verb.text[0] for parcel in spool.take(2000)] == ["0", "1"]
    assert not spool.ahead
    spool.leave([])
    assert isinstance(spool.take()[0].verb.verb, Skipped)
