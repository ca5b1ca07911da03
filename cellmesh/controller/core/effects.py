"""Effects (send a message, show a note, ...), which the core returns and the link carries out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from ...wire.codec import Parcel
from ...wire.ranks import describe_ranks, group_ranks, with_verb
from ...wire.status import RankState

State = Literal["connecting", "starting", "ready", "restarting", "stopping", "ended"]


class Send(msgspec.Struct, frozen=True):
    """Effect: send a message to the agent."""

    parcel: Parcel[Any]


class Deliver(msgspec.Struct, frozen=True):
    """Effect: pass to a run a message that some of its ranks have sent, or `Died` if these ranks
    have died.

    `has_begun` is False if the ranks end a run that they have not begun; thousands of ranks may do
    so at once.
    """

    run: int
    ranks: tuple[int, ...]
    parcel: Parcel[Any]
    has_begun: bool = True


class Watch(msgspec.Struct, frozen=True):
    """Effect: show in a run's status line which code each rank executes or waits in; ranks that
    have not answered the request for their states are left out.
    """

    run: int
    states: Mapping[int, RankState]


class Judge(msgspec.Struct, frozen=True):
    """Effect: give a run the reason for which some of its ranks can never go on, for the report of
    its failure.
    """

    run: int
    verdict: str


class Note(msgspec.Struct, frozen=True):
    """Effect: show a remark with a run's output, also after the run's end."""

    run: int
    text: str


class Finish(msgspec.Struct, frozen=True):
    """Effect: finish a run that every rank has ended."""

    run: int


class Answer(msgspec.Struct, frozen=True):
    """Effect: answer a request of the session, e.g. with the replies that arrived in time."""

    request: int
    value: Any


class Change(msgspec.Struct, frozen=True):
    """Effect: report a new state of the mesh, or progress of its start, to the session."""

    state: State
    cause: Any


class HealReport(msgspec.Struct, frozen=True):
    """The result of a recovery: which ranks were replaced, and whether process groups were rebuilt.

    Attributes:
        respawned: ranks that were dead and have been replaced.
        healed: whether process groups were rebuilt.
        failure: reason why the recovery failed, "" if it succeeded.
        took_s: duration of the recovery, in seconds.
        dead: ranks that are still dead.
        copied_to: ranks to which names were copied.
        copied: the copied names.
        not_copied: names that could not be copied -> reason.
        empty: replaced ranks whose namespaces are still empty.
        notes: remarks on models that were or could not be reset after an interrupted step, and on
            hosts that were replaced.
        steps: differences between the ranks' numbers of optimizer steps, "" if there are none.
        is_apart: whether ranks were stopped at different points, so that replicas may differ.
        num_ranks: number of ranks of the mesh.
        is_supervised: whether the replaced ranks get their actors now.
    """

    respawned: tuple[int, ...] = ()
    healed: bool = False
    failure: str = ""
    took_s: float = 0.0
    dead: tuple[int, ...] = ()
    copied_to: tuple[int, ...] = ()
    copied: tuple[str, ...] = ()
    not_copied: Mapping[str, str] = msgspec.field(default_factory=dict)
    empty: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    steps: str = ""
    is_apart: bool = False
    num_ranks: int = 0
    is_supervised: bool = False


def describe_heal(report: HealReport) -> str:
    """Return a sentence for users on the result of a recovery."""
    if report.failure and not report.healed:
        return f"the mesh could not be healed: {report.failure}"
    text = f"process groups rebuilt in {report.took_s:.1f} s"
    if not report.notes and not report.steps and not report.is_apart:
        text += "; what the ranks hold is untouched"
    subject = with_verb(report.dead or report.copied_to or report.respawned or (0,), "is", "are")
    others = "; the others hold what they held"
    if report.dead:
        it = "it" if len(report.dead) == 1 else "them"
        text = f"{subject} dead: `%dist_heal` replaces {it}"
        text += others * (len(report.dead) < report.num_ranks)
    elif report.copied_to:
        text = f"{subject} new, process groups rebuilt, names copied in {report.took_s:.1f} s"
    elif report.respawned:
        advice = _copy_advice(report.respawned, report.num_ranks)
        empty = "" if report.is_supervised else " and empty"
        text = f"{subject} new{empty}, process groups rebuilt in {report.took_s:.1f} s"
        text += f"{others}{advice if empty else ''}" if advice else ""
    text = "; ".join(filter(None, (text, describe_reset(report))))
    return f"{text}. But {report.failure}" if report.failure else text


def describe_reset(report: HealReport) -> str:
    """Return a sentence on models that were reset and on numbers of optimizer steps that differ,
    for a recovery that has kept the process groups; "" if there are none.
    """
    return "; ".join(filter(None, (*report.notes, report.steps)))


def tell_busy(running: Mapping[int, str], then: str = "heal") -> str:
    """Return the error text for a heal that cannot succeed now, because ranks are busy.

    Args:
        running: rank that is not known to be idle -> title of its run, "" if that is unknown.
        then: the user's next step once the ranks are idle.
    """
    by_title = group_ranks(dict(sorted(running.items())))
    parts = [
        f"{with_verb(ranks, 'runs', 'run')} {title or 'something'}"
        for title, ranks in sorted(by_title.items())
    ]
    return (
        f"{describe_ranks(running)} must be idle for that, and {', '.join(parts)}: wait, or stop "
        f"what runs with %dist_interrupt, then {then}"
    )


def tell_empty(ranks: Iterable[int], num_ranks: int, subject: str = "") -> str:
    """Return a clause which says that the namespaces of replaced ranks are empty, and which command
    fills them.

    Args:
        ranks: the replaced ranks.
        num_ranks: number of ranks of the mesh.
        subject: the clause's subject; "" for a pronoun.
    """
    new = set(ranks)
    it, verb = ("it", "is") if len(new) == 1 else ("they", "are")
    return f"{subject or it} {verb} new and empty{_copy_advice(new, num_ranks)}"


def _copy_advice(new: Iterable[int], num_ranks: int) -> str:
    """Return the command that copies names to new ranks; "" if no other rank has any."""
    for source in sorted({*range(num_ranks)}.difference(new)):
        return f" (`%dist_heal --from {source}` copies from a rank)"
    return ""


def describe_healing(report: HealReport) -> str:
    """Return the text that ``%dist_heal`` shows."""
    if not report.healed and not report.copied_to:
        text = "nothing to heal: every rank lives, and their process groups agree"
        new = report.empty
        return f"{text}; {tell_empty(new, report.num_ranks, describe_ranks(new))}" if new else text
    lines = [describe_heal(report)]
    if report.copied_to:
        lines.append(f"copied: {', '.join(report.copied) or 'nothing'}")
        lines += [f"not copied: {name}: {why}" for name, why in report.not_copied.items()]
    return "\n".join(lines)


Effect = Send | Deliver | Watch | Judge | Note | Finish | Answer | Change
