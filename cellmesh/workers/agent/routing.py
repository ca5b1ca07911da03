"""News for ranks on an agent's host that no controller passes on their messages to other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...wire.codec import Parcel, encode
from ...wire.messages import Ranked
from ...wire.routing import Routed
from .supervisor import ToRanks

_NO_NOTEBOOK = (
    "cannot be called, as no notebook is attached to this mesh: calls between hosts go by way of "
    "one (%dist_attach)"
)


def return_unrouted(parcels: Sequence[Parcel[Any]]) -> Iterator[ToRanks]:
    """Yield the news for each rank that has sent one of these messages to another rank."""
    for verb, _ in parcels:
        if type(verb) is Ranked and type(verb.verb) is Routed:
            yield _news(verb.ranks, verb.verb.mark, verb.verb.rank)


def end_routes(ranks: Sequence[int]) -> ToRanks:
    """Return the news for ranks that nothing that they have sent to others will be answered."""
    return _news(ranks, "", -1)


def _news(ranks: Sequence[int], mark: str, rank: int) -> ToRanks:
    lost = Routed(mark, rank, why_lost=_NO_NOTEBOOK)
    return ToRanks(tuple(ranks), "control", encode([Parcel(lost)]))
