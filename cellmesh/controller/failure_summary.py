"""Describes in words how a run failed, and what its ranks are doing. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import RankDied, RankFailure, RanksInterrupted, RemoteError
from ..wire.codec import Parcel
from ..wire.messages import ENDED_BY_GLOO, Died, Done, Failed, describe_place
from ..wire.ranks import describe_ranks, group_ranks, with_verb
from ..wire.status import RankState
from .core.mesh_state import FIRST_HEAL
from .core.sweeps import SWEEP_S
from .core.verdict import find_verdict
from .core.verdict_text import describe_waits

_MAX_LINE = 300
# Maximum length of a run's summary, in characters: one or two kilobytes in UTF-8.
MAX_SUMMARY = 1900
# Maximum length of the line on the activity of running ranks.
_MAX_LIVE = 600

Outcomes = Mapping[int, Parcel[Any]]


def refuse_dead(dead: Sequence[int], first: Died) -> RankDied:
    """Return the error that refuses a run on dead ranks.

    Args:
        dead: dead ranks among those of the run.
        first: the end of the first of them.
    """
    lines = "; `%dist_status` shows its last lines" if first.last_output else ""
    error = RankDied(
        first.rank,
        f"{first.reason}, so nothing can run on {describe_ranks(dead)}. `%dist_heal` replaces "
        f"dead ranks and keeps the others as they are; `--ranks` runs on the others{lines}",
    )
    error.last_output = first.last_output  # not in its text: each cell would repeat the lines
    return error


def describe_end(ranks: Sequence[int], reason: str) -> str:
    """Describe how ranks have ended, as in ``ranks 2-3 were killed by SIGKILL``.

    Args:
        ranks: one or several ranks.
        reason: cause of death, phrased for one rank, as in `Died`.
    """
    text = reason if len(ranks) == 1 else re.sub("^was ", "were ", reason)
    return f"{describe_ranks(ranks)} {text}"


def failure_of(
    ranks: Iterable[int], outcomes: Outcomes, verdict: str = "", is_interrupted: bool = False
) -> BaseException:
    """Return the exception to raise for ranks that failed: `RankFailure`, or `RanksInterrupted` if
    the user has stopped them.

    Args:
        ranks: ranks whose failures are raised.
        outcomes: rank -> its outcome, for ranks that have ended the run.
        verdict: as in `summarize`.
        is_interrupted: whether the user has interrupted the run.
    """
    verbs = {rank: outcomes[rank].verb for rank in sorted(ranks)}
    failed = {rank: verb for rank, verb in verbs.items() if type(verb) is not Done}
    exceptions = {rank: exception_of(rank, outcomes[rank]) for rank in failed}
    summary = summarize(exceptions, outcomes, verdict)
    is_stopped = any(
        isinstance(exc, KeyboardInterrupt) and not is_released(failed[rank])
        for rank, exc in exceptions.items()
    )
    if is_interrupted and is_stopped:
        return RanksInterrupted(summary)
    tracebacks = {rank: verb.traceback for rank, verb in failed.items() if type(verb) is Failed}
    return RankFailure(summary, exceptions, tracebacks)


def summarize(
    exceptions: Mapping[int, BaseException], outcomes: Outcomes, verdict: str = ""
) -> str:
    """Describe in one line which ranks failed, how and where, and how the other ranks ended, in at
    most `MAX_SUMMARY` characters without the verdict.

    Args:
        exceptions: rank -> its exception, for ranks that did not finish.
        outcomes: rank -> its outcome, for ranks that have ended the run.
        verdict: the reason for which ranks waited for each other; placed first if no rank failed by
            itself.
    """
    verbs = {rank: outcomes[rank].verb for rank in exceptions}
    failed = {
        rank: _describe_failure(verb, exceptions[rank])
        for rank, verb in verbs.items()
        if not is_released(verb)
    }
    released = {rank: _place(verb) for rank, verb in verbs.items() if is_released(verb)}
    is_stopped = all(isinstance(exceptions[rank], KeyboardInterrupt) for rank in failed)
    # A rank that gloo has ended cannot report its operation; if the others are in many, none fits.
    begun = sorted({verb.begun for verb in verbs.values() if type(verb) is Failed and verb.begun})
    if 0 < len(begun) <= 2:
        place = f"{ENDED_BY_GLOO} in {' or '.join(begun)}"
        failed = {rank: text.replace(ENDED_BY_GLOO, place) for rank, text in failed.items()}
    groups = group_ranks(failed)
    parts = [describe_end(ranks, text) for text, ranks in groups.items()]
    parts = _shorten(list(groups.values()), parts, "failed in other ways", MAX_SUMMARY // 2)
    if verdict and is_stopped:
        parts.insert(0, verdict)
    places, left = group_ranks(released), []
    for (where, place), ranks in places.items():
        were = "was" if len(ranks) == 1 else "were"
        waited_s = max(outcomes[rank].verb.waited_s for rank in ranks)
        for_s = f" for {waited_s:.1f} s" if waited_s else ""
        comma = "," if for_s and ", " in place else ""
        left.append(f"{describe_ranks(ranks)} {where}{place}{comma}{for_s} and {were} released")
    parts += _shorten(list(places.values()), left, "were released", MAX_SUMMARY // 4)
    rest = sorted(rank for rank, outcome in outcomes.items() if type(outcome.verb) is Done)
    if rest:
        parts.append(f"{describe_ranks(rest)} finished")
    return "; ".join(parts)


def _shorten(
    groups: Sequence[Sequence[int]], parts: Sequence[str], otherwise: str, limit: int
) -> list[str]:
    """Return the descriptions (`parts`) of groups of ranks that fit into `limit` characters, and a
    description of the ranks of all other groups.
    """
    kept: list[str] = []
    for part in parts:
        limit -= len(part)
        if limit < 0:
            break
        kept.append(part)
    rest = [rank for group in groups[len(kept) :] for rank in group]
    return [*kept, f"{describe_ranks(rest)} {otherwise}"] if rest else kept


def is_released(verb: Any) -> bool:
    """Return whether a rank ended a run only because cellmesh ended its collective, which other
    ranks would never join.
    """
    return type(verb) is Failed and verb.released


def _place(verb: Failed) -> tuple[str, str]:
    where = verb.text.partition("\n")[0][:_MAX_LINE] if verb.text != "ran the cell" else "ran"
    return where, _at(verb)


def _at(verb: Failed | RankState) -> str:
    place = describe_place(verb.line, verb.inner)
    return f" at {place}" if place else ""


def _in_brackets(verb: Failed) -> str:
    place = describe_place(verb.line, verb.inner)
    return f" ({place})" if place else ""


def _describe_failure(verb: Any, exc: BaseException) -> str:
    if type(verb) is Died:
        return verb.reason
    line = _in_brackets(verb)
    if verb.type_name == "BdbQuit":
        return f"left the debugger{line}"
    first_line = verb.text.lstrip().partition("\n")[0][:_MAX_LINE]
    return f"raised {verb.type_name}" + (f": {first_line}" if first_line else "") + line


def describe_state(state: RankState) -> str:
    """Describe the current activity of a rank."""
    if state.run < 0:
        return "idle"
    if state.run >= FIRST_HEAL:
        return "healing its process groups"
    line = _at(state)
    if (call := state.serves) is not None:
        line += f", in {call.title}" + (f" for {call.age_s:.0f} s" if call.age_s >= 1 else "")
    if state.asks:
        return f"asking you{line}"
    if state.collective:
        return f"in {state.collective}{line}"
    if state.peer:
        return f"waiting for {state.peer}{line}"
    where = f" {state.where}" if state.where else ""
    return f"running{where}{line}"


def describe_live(run: int, ranks: Iterable[int], states: Mapping[int, RankState]) -> str:
    """Describe the activity of the ranks that have not ended a run; waiting ranks are named first.

    Args:
        run: number of the run.
        ranks: ranks that have not ended it.
        states: rank -> its state, for ranks that answered.
    """
    doing = group_ranks({rank: _doing(run, states.get(rank)) for rank in ranks})
    parts, groups = [], []
    for text, alike in sorted(doing.items()):
        groups.append(alike)
        own = (states[rank] for rank in alike if rank in states and states[rank].run == run)
        waited_s = max((state.waited_s for state in own), default=0.0)
        for_s = f" for {waited_s:.0f} s" if waited_s >= 1 else ""
        parts.append(f"{describe_ranks(alike)} {text}{for_s}")
    return "; ".join(_shorten(groups, parts, "at other places", _MAX_LIVE))


def _doing(run: int, state: RankState | None) -> str:
    if state is None:
        return "without an answer"
    return describe_state(state) if state.run in (run, -1) else "still in an earlier run"


def explain_waits(states: Mapping[int, RankState], dead: Iterable[int], num_ranks: int) -> str:
    """Describe why ranks can never finish, or else which ranks wait for which other ranks, and the
    activity of those that do not wait.

    Args:
        states: rank -> its state, for ranks that answered.
        dead: dead ranks.
        num_ranks: number of ranks of the mesh.
    """
    gone = set(dead)
    verdict = find_verdict(states, (), num_ranks, SWEEP_S, gone)
    if verdict is not None:
        return verdict.text
    idle = {rank for rank, state in states.items() if state.run < 0 and not state.waiting}
    parts = describe_waits(states, idle, gone, num_ranks)
    if not parts and not any(state.peer for state in states.values()):
        return "no rank waits for another"
    doing = group_ranks(
        {r: describe_state(state) for r, state in sorted(states.items()) if not state.collective}
    )
    others = [f"{with_verb(ranks, 'is', 'are')} {text}" for text, ranks in doing.items()]
    parts += _shorten(list(doing.values()), others, "at other places", _MAX_LIVE)
    if silent := set(range(num_ranks)) - states.keys() - gone:
        parts.append(f"{with_verb(silent, 'does', 'do')} not answer")
    return "; ".join(parts)


def exception_of(rank: int, outcome: Parcel[Any]) -> BaseException:
    """Return the exception that ended a run on a rank, or a `RemoteError` if the exception cannot
    be unpickled.
    """
    verb = outcome.verb
    if type(verb) is Died:
        return RankDied(rank, verb.reason, verb.last_output)
    if verb.payload is None and verb.type_name == "KeyboardInterrupt":  # before the rank began it
        return KeyboardInterrupt(verb.text)
    if verb.payload is None:
        return RemoteError(verb.type_name, verb.text, verb.why_no_payload)
    from ..wire.payload import loads

    try:
        exc = loads(verb.payload, outcome.buffers)
    except Exception as e:
        return RemoteError(verb.type_name, verb.text, f"it cannot be loaded here: {e}")
    if not isinstance(exc, BaseException):
        return RemoteError(verb.type_name, verb.text)
    return exc
