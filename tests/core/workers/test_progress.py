"""tqdm's bars on a rank: they send numbers and draw nothing."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
from tqdm import notebook, std

from cellmesh.wire.verbs import Bar
from cellmesh.workers.progress import TqdmBars
from cellmesh.workers.rank.streams import RankStream


class Rank:
    """A rank's bars, the text that its streams were given, and the messages that it has sent."""

    def __init__(self) -> None:
        self.text = ""
        self.sent: list[Bar] = []
        self.run = 1
        self.bars = TqdmBars(
            lambda parcel: self.sent.append(parcel.verb), lambda: self.run, nullcontext()
        )
        self.file: Any = RankStream("stderr", self, self)  # type: ignore[arg-type]

    def write(self, run: int, stream: str, text: str) -> None:
        self.text += text

    def current(self) -> int:
        return self.run

    def end_run(self, error: BaseException | None = None) -> None:
        self.bars.end_run(self.run, error)

    def states(self) -> list[tuple[int, float, str]]:
        """The last message of each bar: number, steps, state."""
        last = {bar.bar: bar for bar in self.sent}
        return [(bar.bar, bar.done, bar.state) for bar in last.values()]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank whose tqdm reports; in the end tqdm is as it was."""
    monkeypatch.setattr(std.tqdm, "display", std.tqdm.__dict__["display"])
    monkeypatch.setattr(std.tqdm, "monitor_interval", 0)
    for name in ("tqdm_notebook", "tqdm", "tnrange", "trange"):
        monkeypatch.setattr(notebook, name, getattr(notebook, name))
    made = Rank()
    made.bars.watch()
    return made


def test_bar_sends_numbers_and_writes_nothing(rank: Rank) -> None:
    for _ in std.tqdm(range(7), file=rank.file, desc="x", unit="img", postfix="p"):
        std.tqdm.write("between", file=io.StringIO())
    last = rank.sent[-1]
    assert (last.title, last.done, last.total, last.unit, last.note, last.state) == (
        "x", 7.0, 7.0, "img", "p", "done",
    )  # fmt: skip
    assert rank.text == ""


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
def test_scales_and_totals(rank: Rank, options: Any, expected: Any) -> None:
    bar = std.tqdm(**{"total": 10, "file": rank.file, **options})
    bar.update(5)
    bar.close()
    assert (rank.sent[-1].done, rank.sent[-1].total, rank.sent[-1].divisor) == expected


def test_notebook_bar_is_a_bar_of_text(rank: Rank) -> None:
    made: Any = notebook
    bars = (
        made.trange(3, file=rank.file, desc="x", disable=None),
        made.tqdm(range(3), file=rank.file, display=True),
    )
    for bar in bars:
        assert [*bar] == [0, 1, 2]
    assert rank.states() == [(1, 3.0, "done"), (2, 3.0, "done")]


def test_bar_that_is_not_closed_ends_with_its_object(rank: Rank) -> None:
    bar = std.tqdm(total=3, file=rank.file)
    bar.update(3)
    del bar
    assert rank.states() == [(1, 3.0, "done")]
    assert not rank.bars.has_news


def test_open_bar_sends_its_last_numbers_and_goes_on_in_its_run(rank: Rank) -> None:
    bar = std.tqdm(total=9, file=rank.file, mininterval=60)
    bar.update(2)
    rank.end_run()
    assert rank.states() == [(1, 2.0, "open")]
    rank.run = 2
    bar.update(7)
    bar.close()
    assert (rank.sent[-1].run, rank.states()) == (1, [(1, 9.0, "done")])


# ---- bars that an exception ends


def raise_within(rank: Rank) -> None:
    for step in std.trange(9, file=rank.file):
        if step == 2:
            raise RuntimeError


def raise_in_with(rank: Rank) -> None:
    with std.tqdm(total=9, file=rank.file) as bar:
        bar.update(2)
        raise RuntimeError


def raise_beside(rank: Rank) -> None:
    bar = std.tqdm(total=9, file=rank.file)
    bar.update(2)
    globals()["kept"] = bar
    raise RuntimeError


@pytest.mark.parametrize("code", [raise_within, raise_in_with, raise_beside])
def test_a_bar_ends_with_the_exception_that_ends_its_run(rank: Rank, code: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        code(rank)
    rank.end_run(caught.value)
    assert rank.states() == [(1, 2.0, "done")]
