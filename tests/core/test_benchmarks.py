"""The pure parts of the benchmark: targets, tables, and what drivers make of their timings."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import actors, report, run, scripts
from benchmarks.contestants import ACTORS, CONTESTANTS, Contestant
from benchmarks.drivers.bulk import first_and_warm
from benchmarks.drivers.protocol import Counts
from benchmarks.figures import Figures
from benchmarks.measures import GROUPS
from benchmarks.processes import cpu_s
from benchmarks.runner import DriverFailed, Outcome
from benchmarks.targets import ACTORS_TARGETS, SCRIPTS_TARGETS, TARGETS, Target

MEASURED = {
    (contestant, measure)
    for group in GROUPS
    for row in group.rows
    for contestant, measure in [
        (row.own, row.measure),
        *((c, row.measure_of(c)) for c in group.columns),
    ]
}


@pytest.mark.parametrize("path", sorted(Path(report.__file__).parent.glob("[a-z]*.py")))
def test_benchmark_can_be_imported(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")


def figures_of(**measures: list[float]) -> Figures:
    """Of rounds by ``contestant__measure``."""
    samples: dict[str, list[dict[str, float]]] = {}
    for key, values in measures.items():
        contestant, _, measure = key.partition("__")
        rounds = samples.setdefault(contestant.replace("_", "-"), [{} for _ in values])
        for sample, value in zip(rounds, values, strict=True):
            sample[measure] = value
    return Figures(samples)


class Reader(Figures):
    """Figures that are all the same, and know which were read."""

    def __init__(self) -> None:
        super().__init__({})
        self.read: set[tuple[str, str]] = set()

    def __getitem__(self, key: tuple[str, str]) -> float:
        self.read.add(key)
        return 1.0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.what)
def test_a_target_reads_what_the_tables_show(target: Target) -> None:
    reader = Reader()
    target.judge(reader)
    assert reader.read <= MEASURED
    assert {contestant for contestant, _ in reader.read} <= {one.name for one in CONTESTANTS}


@pytest.mark.parametrize(
    ("what", "met", "missed"),
    [
        (
            "no-op call on 8 / lean call",
            figures_of(cellmesh__call_s=[9.0, 1.4, 0.1], lean_call__call_s=[1.0] * 3),
            figures_of(cellmesh__call_s=[1.5], lean_call__call_s=[1.0]),
        ),
        (
            "pipelined no-op calls: cellmesh / Monarch",
            figures_of(cellmesh__calls_per_s=[600.0], monarch__calls_per_s=[100.0]),
            figures_of(cellmesh__calls_per_s=[590.0], monarch__calls_per_s=[100.0]),
        ),
        (
            "a rank more: (call on 64 - call on 8) / 56",
            figures_of(cellmesh__call_s=[1e-3], cellmesh_64__call_s=[2.1e-3]),
            figures_of(cellmesh__call_s=[1e-3], cellmesh_64__call_s=[2.2e-3]),
        ),
    ],
)
def test_a_target_is_judged_by_the_medians(what: str, met: Figures, missed: Figures) -> None:
    (target,) = (target for target in TARGETS if target.what == what)
    assert target.judge(met)[1] == "met"
    assert target.judge(missed)[1] == "missed"
    assert target.judge(Figures({})) == (None, "not measured")


def test_tables_have_what_was_measured_and_how_many_times_better_it_is() -> None:
    figures = figures_of(
        cellmesh_bulk__gather_warm_s=[0.02], memory__memcpy_1gb_s=[0.01], ray__gather_warm_s=[0.05]
    )
    text = report.document(
        figures, {"cellmesh": "0.1.0, commit abc"}, "today", "run", "method", "", ["late"]
    )
    lines = [line.replace(" ", "") for line in text.splitlines()]
    assert "-cellmesh:0.1.0,commitabc" in lines
    assert [line for line in lines if line.startswith("##")] == [
        *("##Bulkdata", "##Targets", "##Trouble", "##Everyround")
    ]
    assert "|8x128MBgathered,again|20.00ms|10.00ms(0.50x)|50.00ms(2.50x)|-|-|" in lines
    assert "|8x128MBgathered,again/onememcpy|atmost2.00x|2.00x|met|" in lines
    assert "|memory|memcpy_1gb_s|10.00ms|" in lines
    assert f"1met,0missed,{len(TARGETS) - 1}notmeasured." in lines


def test_the_first_transfer_stands_alone_and_those_that_warm_up_are_left_out() -> None:
    taken = [9.0, 8.0, 7.0, 1.0, 3.0, 2.0, math.inf]
    sample = first_and_warm("push", taken.__getitem__, Counts(0, 0, 0, num_transfers=3))
    assert sample == {"push_first_s": 9.0, "push_warm_s": 2.0}


def test_the_cpu_time_of_a_process_is_that_of_its_clock() -> None:
    before_s = time.process_time()
    used_s = cpu_s(os.getpid())
    assert before_s <= used_s <= time.process_time()
    with subprocess.Popen("true") as process:
        process.wait()
        assert cpu_s(process.pid) == 0


def test_every_target_of_scripts_is_measured() -> None:
    reader = Reader()
    for target in SCRIPTS_TARGETS:
        target.judge(reader)
    assert {part for part, _ in reader.read} == {*scripts.PARTS}


def test_every_target_of_actors_is_measured() -> None:
    reader = Reader()
    for target in ACTORS_TARGETS:
        target.judge(reader)
    assert {contestant for contestant, _ in reader.read} == {one.name for one in ACTORS}


def test_figures_of_actors_are_beside_those_of_peers() -> None:
    figures = figures_of(cellmesh_actors__sends_s=[0.5], monarch_actors__sends_s=[2.0])
    text = actors.document(figures, {}, ["ray: no environment"])
    (line,) = (line for line in text.splitlines() if "sends to all" in line)
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        *("0.50 s", "Monarch's broadcast: 2.00 s, 0.25 x")
    ]
    assert "- ray: no environment" in text


def test_times_of_scripts_are_medians_and_unmeasured_ones_a_dash() -> None:
    rounds = [{"torchrun_s": taken_s, "first_s": 2.0} for taken_s in (6.0, 7.0, 9.0)]
    *_, line = scripts.times_table(Figures({"ddp-4": rounds})).splitlines()
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        *("ddp-4", "7.00 s", "2.00 s", "-", "-")
    ]


def test_samples_are_added_to_those_in_a_file_also_if_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, asked = tmp_path / "samples.json", list[str]()

    def run_driver(contestant: Contestant, python: object, quick: bool) -> Outcome:
        asked.append(contestant.name)
        if asked[1:] and contestant.name == "cellmesh-copy":
            raise DriverFailed("cellmesh-copy: exit status 1")
        return Outcome({"call_s": float(len(asked))}, 0)

    monkeypatch.setattr(run, "run_driver", run_driver)
    monkeypatch.setattr(run, "_interpreters", lambda *args: ({"": "python"}, []))
    own = [one for one in ACTORS if one.name in ("cellmesh-actors", "cellmesh-copy")]
    run.measure_all(own, tmp_path, 1, True, kept)
    samples, notes = run.measure_all(own, tmp_path, 1, True, kept)
    assert notes == ["cellmesh-copy: exit status 1"]
    assert samples == json.loads(kept.read_text())
    assert {name: len(rounds) for name, rounds in samples.items()} == {
        "cellmesh-copy": 1, "cellmesh-actors": 2,
    }  # fmt: skip
