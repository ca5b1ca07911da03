"""Animations: what replaces itself faster than anybody looks is not shown."""

from __future__ import annotations

from cellmesh.controller.output.fold import Block, Line, Live, Rich
from cellmesh.controller.output.throttle import FRAME_S, Frames


def line(*ranks: int, text: str = "x") -> Block:
    return Block(ranks, Line("stdout", text))


def clear(*ranks: int) -> Block:
    return Block(ranks, Rich("clear", b"wait"), ("",) * len(ranks))


def update(*ranks: int, display: str = "a", value: bytes = b"") -> Block:
    return Block(ranks, Rich("update", value), (display,) * len(ranks))


def test_what_only_grows_passes() -> None:
    frames = Frames()
    blocks = [line(0), line(1), Live((((0,), "50%"),), False)]
    for now in (0.0, 0.01):
        assert frames.pass_on(blocks, now, False) == blocks
    assert frames.deadline() is None


def test_the_first_frame_is_shown_at_once_and_later_ones_ten_times_a_second() -> None:
    frames, shown = Frames(), 0
    for step in range(1000):
        shown += bool(frames.pass_on([clear(0), line(0, text=f"{step}")], step / 1000, False))
    assert 10 <= shown <= 11
    assert frames.deadline() is not None
    last = frames.pass_on([], 1.0, everything=True)
    assert last == [clear(0), line(0, text="999")]
    assert frames.deadline() is None


def test_what_is_held_is_bounded_and_in_order() -> None:
    frames = Frames()
    frames.pass_on([clear(0)], 0.0, False)
    for step in range(1000):
        assert frames.pass_on([clear(0), line(0, text=f"{step}"), line(1)], 0.01, False) == []
    held = frames.pass_on([line(0, text="after")], FRAME_S, False)
    assert held.count(line(1)) == 1000, "rank 1 has cleared nothing"
    assert held[-3:] == [line(0, text="999"), line(1), line(0, text="after")]
    assert sum(block == clear(0) for block in held) == 1


def test_shared_output_is_cleared_for_who_clears() -> None:
    frames = Frames()
    frames.pass_on([clear(0)], 0.0, False)
    live = Live((((0,), "a"), ((1,), "b")), True)
    frames.pass_on([line(0, 1), live, clear(0)], 0.01, False)
    assert frames.pass_on([], 1.0, False) == [line(1), Live((((1,), "b"),), True), clear(0)]


def test_of_updates_the_last_is_shown() -> None:
    frames = Frames()
    frames.pass_on([update(0)], 0.0, False)
    for step in range(100):
        frames.pass_on([update(0, value=b"%d" % step), update(0, display="b")], 0.01, False)
    held = frames.pass_on([], 1.0, False)
    assert held == [update(0, value=b"99"), update(0, display="b")]


def test_a_shared_update_stays_for_ranks_that_have_no_later_one() -> None:
    frames = Frames()
    frames.pass_on([update(0)], 0.0, False)
    frames.pass_on([update(0, 1, value=b"both"), update(1, value=b"later"), clear(0)], 0.01, False)
    held = frames.pass_on([], 1.0, False)
    assert held == [update(0, value=b"both"), update(1, value=b"later"), clear(0)]
