"""Output that replaces itself, of many ranks and faster than a reader sees."""

from __future__ import annotations

from cellmesh.controller.output.fold import Block, Line, Live, Rich
from cellmesh.controller.output.number_folding import compact
from cellmesh.controller.output.printer import FRAME_S, Frames

# ---- lines of many ranks


def test_lines_that_differ_in_numbers_are_one_and_name_the_slowest() -> None:
    lines = [((rank,), f"step {3 + rank % 2} of 10, loss 0.{rank + 1}") for rank in range(4)]
    assert compact(lines) == [((0, 1, 2, 3), "step 3…4 of 10, loss 0.1…0.4  [ranks 0,2 slowest]")]


def test_two_lines_are_left_as_they_are() -> None:
    lines = [((0,), "step 1"), ((1, 2), "step 2")]
    assert compact(lines) == lines


def test_lines_that_differ_in_words_are_left_alone() -> None:
    lines = [((0,), "loads"), ((1,), "trains 3"), ((2,), "waits 3"), ((3,), "trains 4")]
    assert compact(lines) == lines


def test_drawn_bars_do_not_count_and_the_slowest_is_shown() -> None:
    lines = [
        ((0,), " 50%|█████     | 50/100 [00:05<00:05, 10.0it/s]"),
        ((1,), " 20%|██        | 20/100 [00:05<00:20,  4.0it/s]"),
        ((2,), "100%|██████████| 100/100 [00:05<00:00, 20.0it/s]"),
    ]
    assert compact(lines) == [
        (
            (0, 1, 2),
            " 20…100%|██        | 20…100/100 [00:05<00:20,  4.0…20.0it/s]  [rank 1 slowest]",
        )
    ]


def test_line_of_equal_numbers_names_no_rank() -> None:
    assert compact([((rank,), f"{'#' * rank} 5") for rank in range(3)]) == [((0, 1, 2), " 5")]


def test_rank_prefix_of_a_line_is_no_progress() -> None:
    lines = [
        ((rank,), f"rank {rank}: {90 - 10 * rank}%|{'#' * (9 - rank):10}|") for rank in range(3)
    ]
    assert compact(lines) == [((0, 1, 2), "rank 0…2: 70…90%|#######   |  [rank 2 slowest]")]
    done = [((rank,), f"rank {rank}: 100%|{'#' * 10}|") for rank in range(3)]
    assert compact(done) == [((0, 1, 2), f"rank 0…2: 100%|{'#' * 10}|")]


def test_numbers_may_have_thousands_of_digits() -> None:
    assert len(compact([((rank,), f"{'1' * 5000}{rank}") for rank in range(3)])) == 1


# ---- animations


def line(*ranks: int, text: str = "x") -> Block:
    return Block(ranks, Line("stdout", text))


def clear(*ranks: int) -> Block:
    return Block(ranks, Rich("clear", b"wait"), ("",) * len(ranks))


def update(*ranks: int, display: str = "a", value: bytes = b"") -> Block:
    return Block(ranks, Rich("update", value), (display,) * len(ranks))


def test_growing_output_is_not_held_back() -> None:
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


def test_held_output_is_bounded_and_in_order() -> None:
    frames = Frames()
    frames.pass_on([clear(0)], 0.0, False)
    for step in range(200):
        assert frames.pass_on([clear(0), line(0, text=f"{step}"), line(1)], 0.01, False) == []
    held = frames.pass_on([line(0, text="after")], FRAME_S, False)
    assert held.count(line(1)) == 200, "rank 1 has cleared nothing"
    assert held[-3:] == [line(0, text="199"), line(1), line(0, text="after")]
    assert sum(block == clear(0) for block in held) == 1


def test_shared_output_is_cleared_for_the_clearing_rank() -> None:
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
