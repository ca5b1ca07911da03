"""Verbs and messages as frames: what is sent arrives, and what is no message is refused before
anything is done.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import ProtocolError
from cellmesh.wire.attach import Hello
from cellmesh.wire.codec import (
    Codec,
    Parcel,
    at_agent_from_controller,
    at_agent_from_rank,
    at_controller,
    at_rank_for_control,
    at_rank_for_work,
    encode,
)
from cellmesh.wire.handles import FromPeer
from cellmesh.wire.messages import (
    AnyRequest,
    Control,
    Done,
    FromRank,
    Pickled,
    Ranked,
    Relay,
    Stop,
    Stopped,
    ToAgent,
    ToController,
    ToMainThread,
    Verb,
)

from ...support.examples import examples
from ...support.verb_strategies import kinds_of, parcels_of, values_of

DIRECTIONS: dict[str, tuple[Callable[[], Codec[Any]], Any]] = {
    "agent-from-controller": (at_agent_from_controller, ToAgent),
    "agent-from-rank": (at_agent_from_rank, FromRank),
    "rank-work": (at_rank_for_work, ToMainThread),
    "rank-control": (at_rank_for_control, Control),
    "controller": (at_controller, ToController),
}
every_direction = pytest.mark.parametrize(("codec", "union"), DIRECTIONS.values(), ids=DIRECTIONS)

pack = msgspec.msgpack.encode


# ---- what is sent arrives


@every_direction
@examples(20)
@given(data=st.data())
def test_a_batch_round_trips(
    codec: Callable[[], Codec[Any]], union: Any, data: st.DataObject
) -> None:
    parcels = data.draw(st.lists(parcels_of(union), max_size=6))
    assert codec().decode(encode(parcels)) == parcels


# ---- what is no message is refused


@every_direction
@given(frames=st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_random_frames_are_refused(
    codec: Callable[[], Codec[Any]], union: Any, frames: list[bytes]
) -> None:
    try:
        parcels = codec().decode(frames)
    except ProtocolError:
        return
    # A few bytes do spell a message; then it is one that can be sent.
    assert codec().decode(encode(parcels)) == parcels


@every_direction
@examples(20)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_is_refused(
    codec: Callable[[], Codec[Any]], union: Any, data: st.DataObject
) -> None:
    frames = encode(data.draw(st.lists(parcels_of(union), min_size=1, max_size=3)))
    header = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        parcels = codec().decode([header, *frames[1:]])
    except ProtocolError:
        return
    # As bytes: a damaged number may be one that equals nothing, not even itself.
    assert encode(codec().decode(encode(parcels))) == encode(parcels)


@pytest.mark.parametrize(
    ("codec", "verb"),
    [
        (at_agent_from_controller, Relay((0,), "work", 1, 3)),
        (at_agent_from_rank, Done(1, Pickled(b"", 3))),
        (at_controller, Ranked((0,), Done(1, Pickled(b"", 3)))),
    ],
)
@pytest.mark.parametrize("num_sent", [0, 2])
def test_missing_buffers_are_refused(
    codec: Callable[[], Codec[Any]], verb: Any, num_sent: int
) -> None:
    frames = encode([Parcel(verb, (b"one", b"two", b"three"))])
    assert codec().decode(frames) == [Parcel(verb, (b"one", b"two", b"three"))]
    with pytest.raises(ProtocolError, match=f"announced 3 buffers and sent {num_sent}"):
        codec().decode(frames[: 1 + num_sent])


MALFORMED = {
    "nothing": b"",
    "no list": pack({"type": "Stop"}),
    "a verb of another direction": pack([Stopped("x")]),
    "a verb with too few fields": pack([["Hello", b"key"]]),
    "text for a number": pack([["Hello", b"key", "1", 2]]),
    "an unknown channel": pack([["Relay", [0], "back door", 1, 0]]),
    "a huge declared list": b"\xdd\xff\xff\xff\xff",
    "an extension": b"\x91\xc7\x01\x05\x00",
    "nested too deeply": b"\x91\x92\xa4Stop" + b"\x91" * 100_000 + b"\x90",
    "a pickle": pickle.dumps([Stop()]),
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "bad UTF-8 in a tag": pack([["Stop"]]).replace(b"Stop", b"St\xff\xfe"),
    "bad UTF-8 in a field": pack([["Relay", [0], "work", 1, 0]]).replace(b"work", b"wo\xff\xfe"),
}


@pytest.mark.parametrize("header", MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_are_refused(header: bytes) -> None:
    for frames in ([header], [*encode([Parcel(Hello(b"key", 1, 2))]), header]):
        with pytest.raises(ProtocolError, match="a controller"):
            at_agent_from_controller().decode(frames)


@pytest.mark.parametrize("count", [1, 2**63 - 1, -1])
def test_a_false_number_of_frames_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match="announced"):
        at_agent_from_controller().decode([pack([Relay((0,), "work", 1, count)])])
    with pytest.raises(ProtocolError, match="announced"):
        at_agent_from_rank().decode([pack([Done(1, Pickled(b"", count))])])


UNIONS = {
    "ToAgent": ToAgent,
    "ToMainThread": ToMainThread,
    "Control": Control,
    "FromRank": FromRank,
    "ToController": ToController,
    "AnyRequest": AnyRequest,
    "FromPeer": FromPeer,
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


def leaves(base: type) -> set[type]:
    """The classes below `base` that are the base of no other."""
    below = [kind for kind in base.__subclasses__() if kind.__module__.startswith("cellmesh.")]
    return {leaf for kind in below for leaf in leaves(kind)} or {base}


def test_every_verb_stands_in_a_union() -> None:
    assert leaves(Verb) == {kind for union in UNIONS.values() for kind in kinds_of(union)}
