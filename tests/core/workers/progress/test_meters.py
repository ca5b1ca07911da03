"""What a rank sends of its progress bars, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cellmesh.wire.codec import Parcel
from cellmesh.wire.progress import Bar
from cellmesh.workers.progress.meters import GATHER_S, spot_outside, spots_of

from ....support.meters import Rank


def test_the_first_word_goes_at_once_and_the_next_are_gathered() -> None:
    rank = Rank()
    meter, done = rank.open()
    assert rank.states() == [(1, 0.0, "open")]
    for step in range(1, 500):
        done[0] = step / 100
        rank.now += GATHER_S / 100
        rank.meters.changed(meter)
    assert 4 <= len(rank.sent) - 1 <= 5
    rank.meters.flush()
    assert rank.states()[-1] == (1, 4.99, "open")


def test_the_last_word_is_that_of_the_end() -> None:
    rank = Rank()
    meter, done = rank.open()
    done[0] = 10.0
    rank.meters.close(meter, "done")
    done[0] = 11.0
    rank.meters.close(meter, "failed")  # it has ended already
    rank.meters.flush()
    assert rank.states()[1:] == [(1, 10.0, "done")]


def test_short_bars_make_few_messages() -> None:
    rank = Rank()
    for _ in range(1000):
        meter, _ = rank.open()
        rank.meters.close(meter, "done")
    assert len(rank.sent) <= 50
    rank.meters.flush()
    assert len(rank.sent) <= 60
    assert rank.states()[-1] == (1000, 0.0, "done")


def test_transient_bars_that_were_never_shown_are_not_sent() -> None:
    rank = Rank()
    for _ in range(1000):
        meter, _ = rank.open()
        rank.meters.close(meter, "removed")
    rank.meters.flush()
    assert len(rank.sent) <= 60
    shown = {bar.bar for bar in rank.sent if bar.state == "open"}
    assert {bar.bar for bar in rank.sent if bar.state == "removed"} == shown


def test_bars_of_several_threads_keep_their_order() -> None:
    rank = Rank()
    readings = [Bar(0, 0, "first", 1.0, 10.0, 1.0)]

    def read() -> Bar | None:
        """While it is read, another thread begins a bar."""
        if readings:
            other = threading.Thread(target=rank.open, args=("second",))
            other.start()
            other.join()
        return readings.pop() if readings else None

    rank.meters.changed(rank.meters.open(read))
    assert [bar.title for bar in rank.sent] == ["first", "second"]


def test_nested_bars_know_how_many_are_round_them() -> None:
    rank = Rank()
    rank.open("outer")
    rank.open("inner")
    assert [bar.num_outer for bar in rank.sent] == [0, 1]


def test_a_run_does_not_end_while_a_bar_of_its_is_on_its_way() -> None:
    """Another thread sends it: what has been gathered."""
    rank = Rank()
    order: list[str] = []
    has_come = threading.Event()  # the main thread, to the lock or to its answer

    class Lock:
        lock = threading.Lock()

        def acquire(self, blocking: bool = True) -> bool:
            if threading.current_thread() is main:
                has_come.set()
            return self.lock.acquire(blocking)

        def release(self) -> None:
            self.lock.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *exc: object) -> None:
            self.release()

    def end() -> None:
        rank.meters.end_run(1, None)
        order.append("answer")
        has_come.set()

    def send(parcel: Parcel[Any]) -> None:
        main.start()
        assert has_come.wait(20)
        order.append("bar")

    meter, _ = rank.open()
    rank.meters.close(meter, "done")  # it waits to be sent
    main = threading.Thread(target=end)
    rank.meters._send, rank.meters._sending = send, Lock()  # type: ignore[assignment]
    rank.meters.flush()
    main.join(20)
    assert order == ["bar", "answer"]


def test_open_bar_of_a_failed_run_has_failed() -> None:
    rank = Rank()
    _, done = rank.open()
    done[0] = 4.0
    rank.meters.end_run(1, ValueError())
    assert rank.states()[-1] == (1, 4.0, "failed")
    rank.open()
    rank.meters.end_run(1, KeyboardInterrupt())
    assert rank.states()[-1] == (2, 0.0, "stopped")


def test_open_bar_of_a_run_that_ended_well_shows_its_count() -> None:
    rank = Rank()
    _, done = rank.open()
    done[0] = 4.0
    rank.meters.end_run(1, None)
    assert rank.states()[-1] == (1, 4.0, "open")


def test_a_failed_bar_that_goes_on_is_another_one_in_another_run() -> None:
    rank = Rank()
    meter, done = rank.open()
    rank.meters.end_run(1, ValueError())
    rank.run, done[0] = 2, 5.0
    rank.meters.changed(meter)
    rank.meters.flush()
    assert (rank.sent[-1].run, *rank.states()[-1]) == (2, 2, 5.0, "open")


def test_bars_of_threads_do_not_fail_with_the_run() -> None:
    rank = Rank()
    thread = threading.Thread(target=rank.open)
    thread.start()
    thread.join()
    rank.meters.end_run(1, ValueError())
    assert rank.states()[-1][2] == "open"


def test_a_bar_that_cannot_be_read_says_what_it_said_last_and_keeps_no_other_from_it() -> None:
    rank = Rank()
    odd, done = rank.open("odd \ud800")
    _, other = rank.open("other")
    done[0] = other[0] = 5.0
    del done[0]
    rank.now += GATHER_S
    for meter in list(rank.meters._open.values()):
        rank.meters.changed(meter)
    rank.meters.flush()
    assert rank.sent[0].title == "odd ?"
    assert rank.states()[-1] == (2, 5.0, "open")
    rank.meters.end_run(1, ValueError())
    assert {(bar, state) for bar, _, state in rank.states()[-2:]} == {(1, "failed"), (2, "failed")}
    rank.meters.changed(odd)
    rank.meters.close(odd, "done")


def test_bars_are_not_read_under_the_lock() -> None:
    """What is read may take a lock under which another thread, by the collector, ends a bar."""
    rank = Rank()

    def end_another_on_another_thread() -> Bar:
        meter = rank.meters.open(lambda: Bar(0, 0, "passing", 1.0, 1.0, 0.0))
        thread = threading.Thread(target=rank.meters.close, args=(meter, "removed"), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        read.append(True)
        return Bar(0, 0, "t", 1.0, 2.0, 1.0)

    read: list[bool] = []
    meter = rank.meters.open(end_another_on_another_thread)
    rank.meters.changed(meter)
    rank.meters.end_run(1, ValueError())
    rank.meters.changed(meter)
    rank.meters.close(rank.meters.open(end_another_on_another_thread), "done")
    assert len(read) >= 4


# ---- where a bar was left


# A library's generator, as tqdm's: how it was left is seen when it ends.
STEPS = """
def steps(spots):
    try:
        yield from range(10)
    finally:
        spots.append(spot_outside())
"""


def leaves(kind: str, spots: list[Any]) -> None:
    library: dict[str, Any] = {"__name__": "tqdm.fake", "spot_outside": spot_outside}
    exec(STEPS, library)
    for step in library["steps"](spots):
        if step == 3:
            if kind == "raise":
                raise ValueError(step)
            if kind == "finally":
                try:
                    raise ValueError(step)
                finally:
                    step += 1
            break


@pytest.mark.parametrize("kind", ["raise", "finally"])
def test_an_exception_is_known_to_have_left_a_loop(kind: str) -> None:
    spots: list[Any] = []
    with pytest.raises(ValueError, match="3") as caught:
        leaves(kind, spots)
    assert spots[0] in spots_of(caught.value)
    wrapped = RuntimeError()
    wrapped.__cause__ = caught.value
    assert spots[0] in spots_of(wrapped)


def test_a_loop_that_was_broken_off_is_none_that_an_exception_left() -> None:
    spots: list[Any] = []
    leaves("break", spots)
    with pytest.raises(ValueError, match="3") as caught:
        leaves("raise", [])
    assert spots[0] not in spots_of(caught.value)
