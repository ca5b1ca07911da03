"""The view of ``%%dist_profile``: the timeline, which rank others waited for, and where time
went.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ...controller.trace.profile import OperatorByRank, Profile
from ...wire.ranks import format_ranks, group_ranks
from ...wire.trace import covered
from ...wire.user_code import Timing
from .tables import Table, format_time
from .timeline import draw_text, timeline_of
from .timeline_svg import draw_html

# From here on a rank is said to have kept the others waiting: in seconds, and as a part of the
# others' time.
_LATE_S, _LATE_SHARE = 0.005, 0.1


def describe_timings(timings: Mapping[int, Timing]) -> str:
    """Return a line for each group of ranks with equal times, and one that names a slow rank.

    Args:
        timings: of each rank.
    """
    alike = group_ranks({rank: _describe(timing) for rank, timing in sorted(timings.items())})
    lines = [f"[{format_ranks(ranks)}] took {text}" for text, ranks in alike.items()]
    late = find_straggler(timings)
    if late is not None:
        others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
        own = _seconds(_alone_s(timings[late]))
        lines.append(
            f"rank {late} was the straggler: {own} outside collectives, the others "
            f"{_seconds(others)}"
        )
    return "\n".join(lines)


def find_straggler(timings: Mapping[int, Timing]) -> int | None:
    """Return the rank that took clearly longer than the others outside of collectives; None if
    there is none.

    In a collective all wait for the last, so that all seem to take as long: what tells is the rest.
    """
    if len(timings) < 2:
        return None
    late = max(timings, key=lambda rank: _alone_s(timings[rank]))
    others = median(_alone_s(timing) for rank, timing in timings.items() if rank != late)
    over_s = _alone_s(timings[late]) - others
    return late if over_s > max(_LATE_S, _LATE_SHARE * others) else None


def _alone_s(timing: Timing) -> float:
    return timing.elapsed_s - timing.in_collectives_s


def _describe(timing: Timing) -> str:
    text = _seconds(timing.elapsed_s)
    if timing.in_collectives_s:
        text += f", {_seconds(timing.in_collectives_s)} of it in collectives"
    return text


def _seconds(seconds: float) -> str:
    if seconds < 0.0095:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


_TITLES = {
    "computation": "operator (self time)",
    "communication": "communication (until its end)",
    "device": "GPU kernel",
}
_MAX_NAME = 64


@dataclass(frozen=True)
class ProfileView:
    """Draws a profile in the notebook; shows itself as HTML or text.

    Args:
        profile: what to show.
        num_rows: how many operators of each kind.
    """

    profile: Profile
    num_rows: int = 10

    def __repr__(self) -> str:
        pieces = [
            draw_text(timeline_of(self.profile)),
            *map(repr, self._tables()),
            *self._sentences(),
        ]
        return "\n\n".join(pieces) if self.profile.by_rank else "\n".join(self._sentences())

    def _repr_html_(self) -> str:
        words = "".join(f"<div>{html.escape(text)}</div>" for text in self._sentences())
        if not self.profile.by_rank:
            return words
        tables = "".join(
            f'<div style="overflow-x:auto;margin-top:8px">{table._repr_html_()}</div>'
            for table in self._tables()
        )
        return f"{draw_html(timeline_of(self.profile))}{tables}{words}"

    def _sentences(self) -> list[str]:
        texts = [
            self.profile.describe_lateness() if self.profile.by_rank else "",
            self.profile.describe_clocks(),
            # A file below where the notebook runs is known there by its short name.
            self.profile.describe_trace().replace(f" {Path.cwd()}{os.sep}", " "),
        ]
        return [line for text in texts for line in text.splitlines()]

    def _tables(self) -> list[Table]:
        return [rank_table(self.profile), *operator_tables(self.profile.operators, self.num_rows)]


def operator_tables(operators: Sequence[OperatorByRank], num_rows: int) -> list[Table]:
    """Return a table for each kind of a profile's operators, its rows by the time that they took.

    Args:
        operators: longest first.
        num_rows: how many of each kind.
    """
    tables = []
    for kind, title in _TITLES.items():
        of_kind = [operator for operator in operators if operator.kind == kind]
        if not of_kind:
            continue
        rows = [
            (
                one.name if len(one.name) <= _MAX_NAME else f"{one.name[: _MAX_NAME - 1]}…",
                str(one.num_calls),
                format_time(one.mean_s * 1e9),
                format_time(one.min_s * 1e9),
                format_time(one.max_s * 1e9),
                str(one.max_rank),
            )
            for one in of_kind[:num_rows]
        ]
        left = len(of_kind) - len(rows)
        caption = f"and {left} more: --rows {len(of_kind)}" if left else ""
        tables.append(Table((title, "calls", "mean", "min", "max", "max on rank"), rows, caption))
    return tables


def rank_table(profile: Profile) -> Table:
    """Return a table of where each rank's time went in a profiled cell."""
    lateness = profile.lateness
    rows = []
    for rank, found in sorted(profile.by_rank.items()):
        ours = profile.operations[rank]
        rows.append(
            (
                str(rank),
                format_time(found.end_ns - found.start_ns),
                format_time(covered(((start, start + took) for start, took in found.busy))),
                format_time(covered((one.start_ns, one.end_ns) for one in ours)),
                format_time(covered((one.start_ns, one.start_ns + one.waited_ns) for one in ours)),
                str(lateness[rank].num_last),
                str(found.num_collectives),
            )
        )
    headers = (
        "rank",
        "cell",
        "in operators",
        "in collectives",
        "of it waiting",
        "last in",
        "of",
    )
    return Table(headers, rows)
