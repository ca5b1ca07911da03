"""Makes the table of ``%dist_who``: the variables on ranks, a row each, and where ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...controller.inspect.query import look
from ...controller.ranks import Ranks
from ...wire.inspect import Bound, Names, TensorSummary, alphabetically
from ...wire.ranks import describe_ranks, format_ranks, group_ranks
from .tables import Table, compact_table, format_bytes

# How many different texts of one name are told; then how many there are.
_MAX_VARIANTS = 3


def names_table(ranks: Ranks, pattern: str) -> Table:
    """Ask ranks for their variables, and return them as a table.

    Args:
        ranks: who is asked; also busy ones answer.
        pattern: which names, with ``*`` and ``?``.
    """
    looked = look(ranks.rank_set, Names(pattern))
    notes = [
        f"{describe_ranks([rank])}: {refusal}" for rank, refusal in sorted(looked.refusals.items())
    ]
    return fold_names(looked.answers, pattern, notes)


def fold_names(told: Mapping[int, Bound], pattern: str, notes: list[str]) -> Table:
    """Return a table with a row for each variable, from what each rank answered.

    Args:
        told: rank -> its names.
        pattern: which names were asked for.
        notes: lines below.
    """
    by_name: dict[str, dict[int, TensorSummary]] = {}
    for rank, bound in sorted(told.items()):
        for named in bound.names:
            by_name.setdefault(named.path, {})[rank] = named
    names = sorted(by_name, key=alphabetically)
    cut = [bound.names[-1].path for bound in told.values() if bound.num_left_out and bound.names]
    if cut:  # of what comes later, a rank may have told nothing although it has it
        last = min(cut, key=alphabetically)
        names = names[: names.index(last) + 1]
        notes = [
            *notes,
            f"the first {len(names):,} names are shown; a pattern, as `x*`, chooses others",
        ]
    rows = [_row(name, by_name[name], list(told)) for name in names]
    headers = ["name", "type", "shape", "size", "value", "between ranks"]
    what = "names" if pattern == "*" else f"names like {pattern!r}"
    caption = "" if rows or not told else f"{describe_ranks(told)}: no {what}"
    return compact_table(headers, rows, caption, notes, wraps=True)


def _row(name: str, facts: Mapping[int, TensorSummary], ranks: list[int]) -> list[str]:
    parts = [_fold(facts, part) for part in (_type, _shape, _size, _value)]
    differing = [
        word
        for word, part in (("type", _full_type), ("shape", _shape), ("value", _compared))
        if len({part(each) for each in facts.values()}) > 1
    ]
    absent = [rank for rank in ranks if rank not in facts]
    says = [f"not on {describe_ranks(absent).removeprefix('ranks ')}"] if absent else []
    if differing:
        says.append(f"differ in {', '.join(differing)}")
    is_compared = len(ranks) > 1 and all(each.digest for each in facts.values())
    return [name, *parts, "; ".join(says) or ("alike" if is_compared else "")]


def _fold(facts: Mapping[int, TensorSummary], part: Callable[[TensorSummary], str]) -> str:
    """Join the texts of ranks about a variable, equal ones once."""
    variants = group_ranks({rank: part(each) for rank, each in facts.items()})
    if len(variants) == 1:
        return next(iter(variants))
    told = [f"[{format_ranks(ranks)}] {text or '-'}" for text, ranks in variants.items()]
    more = f", and {len(told) - _MAX_VARIANTS} more" if len(told) > _MAX_VARIANTS else ""
    return ", ".join(told[:_MAX_VARIANTS]) + more


def _type(facts: TensorSummary) -> str:
    kind = "class" if facts.kind == "type" else facts.kind.rpartition(".")[2]
    return " ".join(filter(None, (kind, facts.dtype, facts.placements)))


def _full_type(facts: TensorSummary) -> tuple[str, ...]:
    return facts.kind, facts.dtype, facts.placements


def _shape(facts: TensorSummary) -> str:
    if facts.shape is None:
        return ""
    here = "" if facts.local_shape == facts.shape else f", here {tuple(facts.local_shape or ())}"
    return f"{tuple(facts.shape)}{here}"


def _size(facts: TensorSummary) -> str:
    return format_bytes(facts.num_bytes) if facts.num_bytes else ""


def _value(facts: TensorSummary) -> str:
    return facts.text


def _compared(facts: TensorSummary) -> str:
    return facts.digest or facts.text
