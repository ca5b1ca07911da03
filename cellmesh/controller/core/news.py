"""What is told of ranks that are new; of those replaced without being asked for, by the next
cell.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...wire.messages import RankInfo
from ...wire.ranks import describe_ranks, group_ranks
from .effects import Effect, HealReport, Note, describe_heal


class News:
    """Ranks that are new and empty, as long as the user has not been told."""

    def __init__(self) -> None:
        self._endings: dict[int, str] = {}  # rank -> how its predecessor ended

    def add(self, infos: Iterable[RankInfo]) -> None:
        """Those of these ranks that are new and empty are to be told of."""
        self._endings.update(
            {info.rank: info.predecessor_ending for info in infos if info.predecessor_ending}
        )

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """The user knows of these, or all; or they are not empty any more, or dead."""
        for rank in list(self._endings if ranks is None else ranks):
            self._endings.pop(rank, None)

    def tell(self, run: int) -> list[Effect]:
        """Tell it with a run's output, once."""
        endings, self._endings = dict(sorted(self._endings.items())), {}
        if not endings:
            return []
        alike = group_ranks(endings)
        text = "; ".join(f"{describe_ranks(ranks)} {ending}" for ending, ranks in alike.items())
        return [Note(run, f"{text}; {tell_empty(endings)}")]


def tell_empty(ranks: Iterable[int], subject: str = "") -> str:
    """That ranks are new, and what fills them; without a subject, of ranks that have been named."""
    new = set(ranks)
    source = next(rank for rank in range(len(new) + 1) if rank not in new)
    it, verb = ("it", "is") if len(new) == 1 else ("they", "are")
    return f"{subject or it} {verb} new and empty (`%dist_heal --from {source}` copies from a rank)"


def describe_healing(report: HealReport) -> str:
    """What ``%dist_heal`` says."""
    if not report.healed and not report.copied_to:
        text = "nothing to heal: every rank lives, and their process groups agree"
        new = report.empty
        return f"{text}; {tell_empty(new, describe_ranks(new))}" if new else text
    lines = [describe_heal(report)]
    if report.copied_to:
        lines.append(f"copied: {', '.join(report.copied) or 'nothing'}")
        lines += [f"not copied: {name}: {why}" for name, why in report.not_copied.items()]
    return "\n".join(lines)
