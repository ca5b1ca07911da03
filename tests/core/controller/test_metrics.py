"""What ranks log, kept and drawn."""

from __future__ import annotations

import base64
import math
import re
from xml.etree import ElementTree

import pytest
import torch

from cellmesh.controller.metrics import (
    Metrics,
    Plot,
    Series,
    describe_nans,
    plot,
    thin,
)
from cellmesh.errors import MeshUsageError
from cellmesh.magics.render.plots import draw_html
from cellmesh.wire.codec import Parcel
from cellmesh.wire.verbs import Logged
from cellmesh.workers import metrics as reporting
from cellmesh.workers.metrics import Reporter


def logged(**values: list[float]) -> Parcel[Logged]:
    count = len(next(iter(values.values())))
    steps = tuple(map(float, range(count)))
    return Parcel(Logged(1, tuple(values), steps, tuple(tuple(row) for row in values.values())))


def report(*points: tuple[float | None, dict[str, object]]) -> list[Logged]:
    sent: list[Parcel[Logged]] = []
    reporter = Reporter(sent.append, lambda: 7)
    for step, values in points:
        reporter.log(step, values)
    reporter.flush()
    return [parcel.verb for parcel in sent]


@pytest.mark.parametrize("value", ["3", None, torch.zeros(2), torch.tensor(1j), [1.0]])
def test_log_refuses_values_that_are_no_numbers_by_name(value: object) -> None:
    with pytest.raises(MeshUsageError, match=r"log\(loss=\.\.\.\): .* is no number"):
        report((0, {"fine": 1.0, "loss": value}))


def test_series_are_kept_by_rank_and_restart_with_a_new_loop() -> None:
    metrics, told = Metrics(), []
    end = metrics.watch(told.append)
    metrics.take(1, (0, 1), logged(loss=[3.0, 2.0]))
    metrics.take(1, (2,), logged(loss=[9.0], extra=[1.0]))
    assert metrics.names() == ("loss", "extra")
    assert metrics.series("loss") == {
        0: Series((0, 1), (3, 2)), 1: Series((0, 1), (3, 2)), 2: Series((0,), (9,)),
    }  # fmt: skip
    metrics.settle()
    end()
    metrics.take(2, (0,), logged(loss=[7.0]))
    metrics.settle()
    assert told == [{"loss"}, {"loss", "extra"}, None]
    assert metrics.series("loss")[0] == Series((0,), (7,))
    with pytest.raises(MeshUsageError, match="name what to plot: loss"):
        plot(metrics, (), (0,))


@pytest.mark.parametrize("num_in_one_message", [1, 2, 3, 6])
def test_series_of_a_repeated_inner_loop_restarts_for_any_batching(num_in_one_message: int) -> None:
    metrics, sent = Metrics(), list[Parcel[Logged]]()
    reporter = Reporter(sent.append, lambda: 7)
    reporter.log(99, {"other": 0.0})  # the first is sent at once
    for count, step in enumerate((7, 8, 9, 0, 1, 2), 1):
        reporter.log(step, {"loss": count})
        if count % num_in_one_message == 0:
            reporter.flush()
    for parcel in sent:
        metrics.take(7, (0,), parcel)
    assert metrics.series("loss")[0] == Series((0, 1, 2), (4, 5, 6))


def test_of_many_points_the_first_and_the_last_are_sent() -> None:
    last = 2 * reporting.MAX_POINTS
    sent = report((99, {"other": 0.0}), *((step, {"a": step}) for step in range(last + 1)))
    steps = [step for verb in sent if verb.names == ("a",) for step in verb.steps]
    assert (steps[0], steps[-1]) == (0, last)
    assert steps == sorted(steps)
    assert len(steps) < last


EXTREMES = [
    *([1.0], [1.0, math.nan, 3.0], [math.inf, 2.0], [5.0, 5.0], [1e-30, 1e30], [0.0, 5e-324]),
    *([1.0, 1.0 + 2**-52], [1e299, -1e299], [1.7e308, 1.0], [1.0, math.inf, -math.inf]),
]


@pytest.mark.parametrize("values", EXTREMES, ids=repr)
def test_a_picture_is_drawn_of_anything(values: list[float]) -> None:
    metrics = Metrics()
    metrics.take(1, (0,), logged(a=values))
    metrics.take(1, (3,), logged(a=[-value for value in values]))
    page = draw_html(Plot(metrics, ("a", "b"), (0, 3)))
    picture = picture_in(page)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert not re.search("nan|inf", picture)
    assert "b</b>: nothing to draw yet" in page


def picture_in(page: str) -> str:
    (encoded,) = re.findall(r"base64,([^\"]+)", page)
    return base64.b64decode(encoded).decode()


def test_where_a_line_becomes_nan_is_marked_and_said() -> None:
    metrics, text = Metrics(), "first NaN on rank 6 at step 1, later on rank 7"
    metrics.take(1, (0, 1), logged(loss=[3.0, 2.0, 1.0]))
    metrics.take(1, (6,), logged(loss=[3.0, math.nan, math.nan]))
    metrics.take(1, (7,), logged(loss=[3.0, 1.0, math.nan, 1.0]))
    view = Plot(metrics, ("loss",), (0, 1, 6, 7))
    assert text in repr(view)
    assert "loss [6] 3 points, last nan, least 3, most 3" in repr(view)
    page = draw_html(view)
    picture = picture_in(page)
    assert text in page
    assert text in picture
    assert describe_nans({0: Series((0, 1), (1.0, 2.0))}) == ""


def test_thinning_keeps_peaks_ends_and_where_nan_begins() -> None:
    values = [*range(3000), *[math.nan] * 3000]
    values[1234] = -50.0
    few = thin(Series(tuple(map(float, range(6000))), tuple(values)), 600)
    assert describe_nans({0: few}) == "first NaN on rank 0 at step 3000"
    assert {0.0, 1234.0, 2999.0, 5999.0} <= set(few.steps)
    assert list(few.steps) == sorted(few.steps)
    assert len(few.values) <= 603
