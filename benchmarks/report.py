"""Puts a run into words and Markdown tables, aligned so that they read as well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .contestants import CONTESTANTS
from .figures import Figures
from .targets import TARGETS, Target
from .units import MEGABYTES, MILLISECONDS, PER_SECOND, SECONDS, TIMES, Unit


@dataclass(frozen=True)
class Row:
    """A measure, and who has it.

    Args:
        title: what it is.
        measure: its name in samples.
        unit: how it is shown.
        own: who of ours has it.
        floor: the contestant that nothing can go under, if there is one.
        more_is_better: what a ratio above 1 means; ratios are always "times better".
        has_ratios: whether ratios say anything.
    """

    title: str
    measure: str
    unit: Unit
    own: str = "cellmesh"
    floor: str = ""
    more_is_better: bool = False
    has_ratios: bool = True


ROWS = (
    Row("import of the package", "import_s", MILLISECONDS, has_ratios=False),
    Row("start of 8 ranks, torch imported (*)", "start_s", SECONDS, floor="torch-import"),
    Row("restart of 8 ranks", "restart_s", SECONDS),
    Row("no-op call on 8, median", "call_s", MILLISECONDS, floor="zeromq-hop"),
    Row("no-op call on 8, p99", "call_p99_s", MILLISECONDS, floor="zeromq-hop"),
    Row("cell `pass` on 8 in a kernel, median", "cell_s", MILLISECONDS, own="cellmesh-cells"),
    Row("cell `pass` on 8 in a kernel, p99", "cell_p99_s", MILLISECONDS, own="cellmesh-cells"),
    Row("pipelined no-op calls on 8", "calls_per_s", PER_SECOND, floor="zeromq-hop", more_is_better=True),
    Row("memory of the tree, 8 ranks (PSS)", "pss_bytes", MEGABYTES),
    Row("start of 64 ranks (*)", "start_s", SECONDS, own="cellmesh-64"),
    Row("restart of 64 ranks", "restart_s", SECONDS, own="cellmesh-64"),
    Row("no-op call on 64, median", "call_s", MILLISECONDS, own="cellmesh-64"),
    Row("no-op call on 64, p99", "call_p99_s", MILLISECONDS, own="cellmesh-64"),
    Row("pipelined no-op calls on 64", "calls_per_s", PER_SECOND, own="cellmesh-64", more_is_better=True),
    Row("memory of the tree, 64 ranks (PSS)", "pss_bytes", MEGABYTES, own="cellmesh-64"),
)

FOOTNOTE = (
    "(*) From the call that starts, the package already imported, until every rank has answered with torch "
    "imported; for cellmesh the process group and the DeviceMesh are up then as well, the peers have none."
)


def measures_table(figures: Figures) -> str:
    """Medians of all measures, with the peers' and the floors' beside them."""
    who = ["cellmesh", "Monarch 0.7.0", "ipyparallel 9.2.0", "floor"]
    lines = [["", *who, *(f"vs {other}" for other in who[1:])]]
    for row in ROWS:
        own = figures.get(row.own, row.measure)
        if own is None:
            continue
        has_peers = row.own != "cellmesh-64"
        monarch = figures.get("monarch", row.measure) if has_peers else None
        ipyparallel = figures.get("ipyparallel", row.measure) if has_peers else None
        floor = figures.get(row.floor, row.measure)
        ratios = [_times_better(row, own, other) for other in (monarch, ipyparallel, floor)]
        lines.append([row.title, *map(row.unit.show, (own, monarch, ipyparallel, floor)), *ratios])
    return table(lines)


def _times_better(row: Row, own: float, other: float | None) -> str:
    if other is None or not row.has_ratios:
        return "-"
    return TIMES.show(own / other if row.more_is_better else other / own)


def targets_table(figures: Figures, targets: Sequence[Target] = TARGETS) -> str:
    """Every target, the figure reached, and whether it is met."""
    lines = [["target", "bound", "reached", ""]]
    for target in targets:
        value, verdict = target.judge(figures)
        bound = f"at {target.at} {target.unit.show(target.bound)}"
        lines.append([target.what, bound, target.unit.show(value), verdict])
    return table(lines)


def rounds_table(figures: Figures) -> str:
    """Every round's values: how far a median is to be believed."""
    lines = [["contestant", "measure", "rounds"]]
    units = {row.measure: row.unit for row in ROWS}
    for contestant in CONTESTANTS:
        for measure, unit in units.items():
            rounds = figures.rounds(contestant.name, measure)
            if rounds:
                lines.append([contestant.title, measure, ", ".join(map(unit.show, rounds))])
    return table(lines)


def _verdict(figures: Figures) -> str:
    """How many targets are met, and which are missed, in words."""
    judged = [(target, *target.judge(figures)) for target in TARGETS]
    verdicts = [verdict for _, _, verdict in judged]
    lines = [", ".join(f"{verdicts.count(name)} {name}" for name in ("met", "missed", "not measured")) + "."]
    for target, value, verdict in judged:
        if verdict == "missed":
            bound = target.unit.show(target.bound)
            lines.append(
                f"- missed: {target.what} is {target.unit.show(value)}, to be at {target.at} {bound}"
            )
    return "\n".join(lines)


def document(
    figures: Figures,
    machine: Mapping[str, str],
    date: str,
    command: str,
    method: str,
    profile: str,
    notes: Sequence[str],
) -> str:
    """All of a run, as Markdown.

    Args:
        figures: the medians.
        machine: facts about it.
        date: when.
        command: that was run.
        method: how often what was repeated.
        profile: where the CPU time of a call goes, as Markdown.
        notes: what went wrong.
    """
    facts = {"date": date, "command": f"`{command}`", **machine}
    sections = [
        "# Results",
        "\n".join(f"- {name}: {fact}" for name, fact in facts.items()),
        method,
        measures_table(figures),
        FOOTNOTE,
        "Ratios say how many times better cellmesh is: above 1 it is ahead.",
        "## Targets",
        targets_table(figures),
        _verdict(figures),
        *(["## Trouble", "\n".join(f"- {note}" for note in notes)] if notes else []),
        *(["## Where the CPU time of a call goes", profile.strip()] if profile else []),
        "## Every round",
        rounds_table(figures),
    ]
    return "\n\n".join(sections) + "\n"


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first line is its head."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])
