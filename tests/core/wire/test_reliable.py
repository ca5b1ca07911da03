"""Messages over connections that are cut at any moment: none lost, none twice, in order."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import ProtocolError
from cellmesh.wire.reliable import ACK_BYTES, ACK_S, Reliable


def test_acknowledgement_is_delayed_except_after_many_bytes() -> None:
    here, there = Reliable[str](), Reliable[str]()
    there.unwrap(here.wrap("a", 1), 1, 5.0)
    assert not there.owes_ack(5.0)
    assert there.owes_ack(5.0 + ACK_S)
    there.unwrap(here.wrap("b", ACK_BYTES), ACK_BYTES, 5.01)
    assert there.owes_ack(5.01)
    here.unwrap(there.wrap("an answer", 1), 1, 5.02)
    assert there.ack_at is None
    assert here.kept_bytes == 0
    here, other = Reliable[str](), Reliable[str]()
    preamble = here.wrap("twice", 1)
    assert other.unwrap(preamble, 1, 0.0)
    other.wrap_aside()  # lost
    assert not other.unwrap(preamble, 1, 1.0)
    assert other.owes_ack(1.0)


def test_given_up_messages_are_kept_no_longer() -> None:
    here = Reliable[str]()
    here.wrap("a", 1)
    here.wrap("b", 2)
    assert here.take_kept() == ["a", "b"]
    assert here.kept_bytes == 0
    assert here.resume(0) == []


def test_acknowledgement_of_an_unsent_message_is_refused() -> None:
    here, other = Reliable[str](), Reliable[str]()
    other.unwrap(Reliable[str]().wrap("x", 1), 1, 0.0)
    with pytest.raises(ProtocolError, match="1 messages, of 0"):
        here.unwrap(other.wrap_aside(), 0, 0.0)


@pytest.mark.parametrize("preamble", [b"", b"x" * 15, b"x" * 17])
def test_invalid_preamble_is_refused(preamble: bytes) -> None:
    with pytest.raises(ProtocolError, match="preamble"):
        Reliable[str]().unwrap(preamble, 0, 0.0)
    with pytest.raises(ProtocolError, match="preamble"):
        Reliable.is_aside(preamble)


class Side:
    """One end of a link, with what is under way to it."""

    def __init__(self) -> None:
        self.reliable: Reliable[int] = Reliable(lambda message: self.acked.append(message))
        self.acked: list[int] = []
        self.heard: list[int] = []
        self.num_said = 0
        self.coming: collections.deque[tuple[bytes, int | None]] = collections.deque()

    def say(self, other: Side) -> None:
        self.num_said += 1
        other.coming.append((self.reliable.wrap(self.num_said, 1), self.num_said))

    def acknowledge(self, other: Side) -> None:
        other.coming.append((self.reliable.wrap_aside(), None))

    def hear(self) -> None:
        if self.coming:
            preamble, message = self.coming.popleft()
            if self.reliable.unwrap(preamble, 1, 0.0):
                assert message is not None
                self.heard.append(message)

    def resume(self, other: Side) -> None:
        other.coming.extend(self.reliable.resume(other.reliable.num_received))


STEPS = st.lists(
    st.tuples(st.sampled_from(["say", "hear", "ack", "lose", "lose some", "cut"]), st.booleans()),
    max_size=80,
)


@given(STEPS)
def test_every_message_is_delivered_once_in_order_for_any_loss(
    steps: list[tuple[str, bool]],
) -> None:
    sides = Side(), Side()

    def cut() -> None:
        for side in sides:
            side.coming.clear()
        for side, other in (sides, sides[::-1]):
            side.resume(other)

    for what, which in steps:
        side, other = sides if which else sides[::-1]
        if what == "say":
            side.say(other)
        elif what == "hear":
            side.hear()
        elif what == "ack":
            side.acknowledge(other)
        elif what == "lose":  # the connection broke: later ones may go over the next one first
            side.coming.clear()
        elif what == "lose some" and side.coming:
            side.coming.popleft()
        elif what == "cut":
            cut()
    cut()
    for side in sides:
        while side.coming:
            side.hear()
    for side, other in (sides, sides[::-1]):
        assert other.heard == list(range(1, side.num_said + 1))
        other.acknowledge(side)
        while side.coming:
            side.hear()
        assert side.acked == other.heard
        assert side.reliable.kept_bytes == 0
