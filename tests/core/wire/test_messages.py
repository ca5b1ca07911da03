"""The verbs: every one survives the wire, and none can be taken for another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.messages import (
    AnyRequest,
    Control,
    FromRank,
    ToAgent,
    ToController,
    ToMainThread,
    Verb,
)

from ...support.examples import examples
from ...support.verb_strategies import kinds_of, values_of

UNIONS = {
    "ToAgent": ToAgent,
    "ToMainThread": ToMainThread,
    "Control": Control,
    "FromRank": FromRank,
    "ToController": ToController,
    "AnyRequest": AnyRequest,
}
EVERY_VERB = [
    pytest.param(union, kind, id=f"{name}-{kind.__name__}")
    for name, union in UNIONS.items()
    for kind in kinds_of(union)
]


@pytest.mark.parametrize(("union", "kind"), EVERY_VERB)
@examples(10)
@given(data=st.data())
def test_every_verb_is_a_value_and_round_trips(
    union: Any, kind: type[Verb], data: st.DataObject
) -> None:
    verb = data.draw(values_of(kind))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(verb), type=union)
    assert decoded == verb
    assert hash(decoded) == hash(verb)
    assert type(decoded) is kind
    for field in kind.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(verb, field, None)


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
def test_tags_are_unique_in_a_union(union: Any) -> None:
    tags = [kind.__struct_config__.tag for kind in kinds_of(union)]
    assert len(set(tags)) == len(tags)


def leaves(base: type) -> set[type]:
    """The classes below `base` that are the base of no other."""
    below = [kind for kind in base.__subclasses__() if kind.__module__.startswith("cellmesh.")]
    return {leaf for kind in below for leaf in leaves(kind)} or {base}


def test_every_verb_stands_in_a_union() -> None:
    assert leaves(Verb) == {kind for union in UNIONS.values() for kind in kinds_of(union)}
