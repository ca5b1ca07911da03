"""tqdm and rich on a rank: their bars report numbers and draw nothing."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from rich import console, progress
from tqdm import std

from cellmesh.workers.progress.libraries import is_ours, patch_rich, patch_std
from cellmesh.workers.rank.streams import RankStream

from ....support.meters import Rank


class Pump:
    """Keeps what a stream writes."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, run: int, stream: str, text: str) -> None:
        self.text += text


class Tracker:
    def current(self) -> int:
        return 1


# ---- tqdm


TqdmRank = tuple["Rank", "Pump", Any]


@pytest.fixture
def tqdm_rank(monkeypatch: pytest.MonkeyPatch) -> TqdmRank:
    """tqdm as a rank has it; in the end as it was."""
    rank, pump = Rank(), Pump()
    for name in ("display", "clear", "close", "__exit__"):
        monkeypatch.setattr(std.tqdm, name, std.tqdm.__dict__[name])
    monkeypatch.setattr(std.tqdm, "monitor_interval", 0)
    patch_std(std, rank.meters)
    file: Any = RankStream("stderr", pump, Tracker())  # type: ignore[arg-type]
    return rank, pump, file


def test_a_bar_says_numbers_and_writes_nothing(tqdm_rank: TqdmRank) -> None:
    rank, pump, file = tqdm_rank
    for _ in std.tqdm(range(7), file=file, desc="x", unit="img", postfix="p"):
        pass
    rank.meters.flush()
    last = rank.sent[-1]
    assert (last.title, last.done, last.total, last.unit, last.note, last.state) == (
        "x", 7.0, 7.0, "img", "p", "done",
    )  # fmt: skip
    assert pump.text == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"unit_scale": True}, (5.0, 10.0, 1000)),
        ({"unit_scale": True, "unit_divisor": 1024}, (5.0, 10.0, 1024)),
        ({"unit_scale": 8}, (40.0, 80.0, 0)),
        ({"initial": 2}, (7.0, 10.0, 0)),
        ({"total": None}, (5.0, 0.0, 0)),
        ({"total": float("inf")}, (5.0, 0.0, 0)),
    ],
)
def test_scales_and_totals(tqdm_rank: TqdmRank, options: Any, expected: Any) -> None:
    rank, _, file = tqdm_rank
    bar = std.tqdm(**{"total": 10, "file": file, **options})
    bar.update(5)
    bar.close()
    rank.meters.flush()
    assert (rank.sent[-1].done, rank.sent[-1].total, rank.sent[-1].divisor) == expected


def test_a_bar_that_has_not_been_closed_ends_with_its_object(tqdm_rank: TqdmRank) -> None:
    rank, _, file = tqdm_rank
    bar = std.tqdm(total=3, file=file)
    bar.update(3)
    del bar
    rank.meters.flush()
    assert rank.states()[-1] == (1, 3.0, "done")


def test_delayed_bar_that_ends_early_is_never_shown(tqdm_rank: TqdmRank) -> None:
    rank, pump, file = tqdm_rank
    for _ in std.tqdm(range(3), delay=60, file=file):
        pass
    rank.meters.flush()
    assert rank.sent == []
    assert pump.text == ""


def test_a_file_of_the_users_own_is_written(tqdm_rank: TqdmRank) -> None:
    rank, _, _ = tqdm_rank
    file = io.StringIO()
    for _ in std.tqdm(range(3), file=file):
        pass
    assert "3/3" in file.getvalue()
    assert rank.sent == []
    assert not is_ours(file)


def test_bar_closed_by_an_exception_has_failed(tqdm_rank: TqdmRank) -> None:
    rank, _, file = tqdm_rank
    bar = std.tqdm(total=9, file=file)
    bar.update(2)
    bar.__enter__().__exit__(ValueError, ValueError("no"), None)
    rank.meters.flush()
    assert rank.states()[-1] == (1, 2.0, "failed")


# ---- rich


@pytest.fixture
def rich_rank(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, progress.Progress]:
    """rich as a rank has it, and bars of its that are looked at when the test says so."""
    rank = Rank()
    for name in ("start", "refresh", "stop", "__exit__"):
        monkeypatch.setattr(progress.Progress, name, progress.Progress.__dict__[name])
    patch_rich(progress, rank.meters)
    file: Any = RankStream("stdout", Pump(), Tracker())  # type: ignore[arg-type]
    return rank, progress.Progress(console=console.Console(file=file), auto_refresh=False)


def test_fields_that_cannot_be_compared_are_left_alone(
    rich_rank: tuple[Rank, progress.Progress],
) -> None:
    rank, bars = rich_rank
    with bars:
        task = bars.add_task("a", total=3, grads=torch.zeros(3), loss=0.5)
        bars.add_task("b", total=None)
        odd: Any = bars.tasks[1]
        odd.completed = torch.zeros(2)
        for step in range(3):
            bars.update(task, advance=1, grads=torch.ones(3), loss=step / 4)
            bars.refresh()
    rank.meters.flush()
    said = {bar.bar: (bar.done, bar.note, bar.state) for bar in rank.sent}
    assert said == {1: (3.0, "loss=0.5", "done"), 2: (0.0, "", "done")}


def test_tasks_are_looked_at_by_one_thread_at_a_time(
    rich_rank: tuple[Rank, progress.Progress],
) -> None:
    rank, bars = rich_rank
    with bars:
        bars.add_task("a", total=3)
        tasks: Any = vars(bars)["_cellmesh_tasks"]
        thread = threading.Thread(target=bars.refresh, daemon=True)
        with tasks._lock:  # as its own thread has it while it looks
            thread.start()
            bars.add_task("b", total=3)
            assert thread.is_alive()
        thread.join(20)
        assert not thread.is_alive()
    assert sorted({bar.bar for bar in rank.sent}) == [1, 2]
