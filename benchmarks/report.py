"""Puts a run into words and Markdown tables, aligned so that they read as well in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .contestants import CONTESTANTS
from .figures import Figures
from .measures import GROUPS, Group, Row
from .targets import TARGETS, Target
from .units import TIMES


def measures_tables(figures: Figures) -> str:
    """Medians of all measures, the floors' and the peers' beside them; without what was not
    measured.
    """
    return "\n\n".join(
        f"## {group.title}\n\n{lines}\n\n{group.note}"
        for group in GROUPS
        if (lines := _measures_table(group, figures))
    )


def _measures_table(group: Group, figures: Figures) -> str:
    titles = {contestant.name: contestant.title for contestant in CONTESTANTS}
    lines = [["", "cellmesh", *(titles[name] for name in group.columns)]]
    for row in group.rows:
        own = figures.get(row.own, row.measure)
        if own is not None:
            others = [figures.get(name, row.measure_of(name)) for name in group.columns]
            lines.append(
                [row.title, row.unit.show(own), *(_beside(row, own, other) for other in others)]
            )
    return table(lines) if len(lines) > 1 else ""


def _beside(row: Row, own: float, other: float | None) -> str:
    """Another one's figure, and how many times better ours is."""
    if other is None or not row.has_ratios:
        return row.unit.show(other)
    return (
        f"{row.unit.show(other)} ({TIMES.show(own / other if row.more_is_better else other / own)})"
    )


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
    rows = [row for group in GROUPS for row in group.rows]
    units = {
        measure: row.unit for row in rows for measure in (row.measure, *(row.beside or {}).values())
    }
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
    lines = [
        ", ".join(f"{verdicts.count(name)} {name}" for name in ("met", "missed", "not measured"))
        + "."
    ]
    for target, value, verdict in judged:
        if verdict == "missed":
            bound = target.unit.show(target.bound)
            lines.append(
                f"- missed: {target.what} is {target.unit.show(value)}, to be at {target.at} "
                f"{bound}"
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
        "In brackets, how many times better cellmesh is: above 1 it is ahead.",
        measures_tables(figures),
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
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *body])
