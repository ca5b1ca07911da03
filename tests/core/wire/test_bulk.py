"""Segments between hosts arrive whole, in order for each rank, and never long before the rest."""

from __future__ import annotations

import collections
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import HostError
from cellmesh.wire import limits, segments
from cellmesh.wire.bulk import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, Arrivals, Sender, Window
from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.messages import Interrupt, Relay, Release
from cellmesh.wire.reliable import Reliable
from cellmesh.wire.segment_pool import SegmentPool
from cellmesh.wire.segments import INTERRUPTED, SegmentFrame, map_private, open_segment
from cellmesh.wire.values import Chunk
from cellmesh.workers.agent.rank_link import Lending

DATA = os.urandom(3 << 20)


def make_segment(data: bytes = DATA, loan: int = 7) -> SegmentFrame:
    memfd = segments.create(segments.span([len(data)]), "cellmesh-test")
    segments.write(memfd, [data])
    return SegmentFrame.of(memfd, loan, [len(data)])


def push(run: int, ranks: tuple[int, ...], frame: SegmentFrame) -> Parcel[Relay]:
    """As it arrives on another host."""
    return Parcel(Relay(ranks, "work", run, 2, lends=True), (b"header", bytes(frame)))


def cell(run: int, ranks: tuple[int, ...]) -> Parcel[Relay]:
    return Parcel(Relay(ranks, "work", run, 1), (b"cell",))


class Host:
    """The agent's side: what has arrived, and what goes on to ranks."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(INTERRUPTED, SegmentPool("cellmesh-test"))
        self.passed: list[Parcel[Any]] = []

    def hear(self, parcel: Parcel[Any]) -> bool:
        verb, buffers = parcel
        if isinstance(verb, Chunk):
            taken = self.arrivals.take(verb, bytes(buffers[0]))
            self.passed += taken or ()
            return taken is not None
        self.passed += self.arrivals.admit(parcel, verb.ranks, verb.run, verb.lends)
        return True

    @property
    def runs(self) -> list[int]:
        return [parcel.verb.run for parcel in self.passed]


def value_of(parcel: Parcel[Any]) -> bytes:
    return bytes(map_private(open_segment(parcel.buffers[-1]))[0])


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize("has_room", [True, False], ids=["mapped", "no address space is left"])
def test_segment_arrives_whole_before_its_run_goes_on(
    has_room: bool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(frame: SegmentFrame) -> memoryview:
        raise HostError("a value cannot be mapped")

    sender, frame = Sender(), make_segment()
    with monkeypatch.context() as patch:
        if not has_room:
            patch.setattr(segments, "map_whole", refuse)
        sender.add(frame, (0, 1))
    host.hear(push(1, (0, 1), frame))
    while (chunk := sender.next(0.0)) is not None:
        assert host.runs == []
        host.hear(chunk)
        sender.acked([chunk], 0.01)
    assert host.runs == [1]
    assert value_of(host.passed[0]) == DATA
    assert host.passed[0].buffers[0] == b"header"
    assert not sender
    assert not host.arrivals


def test_only_ranks_that_wait_for_a_segment_have_their_order_kept(host: Host) -> None:
    frame = make_segment()
    host.hear(push(1, (0, 1), frame))
    host.hear(cell(2, (1, 2)))  # behind the push on rank 1
    host.hear(cell(3, (2,)))  # behind that on rank 2
    host.hear(cell(4, (3,)))
    assert host.runs == [4]
    host.hear(Parcel(Chunk(7, 0, 0), (DATA,)))
    assert host.runs == [4, 1, 2, 3]


@pytest.mark.parametrize("verb", [Interrupt(1), Release(1)])
def test_run_that_is_interrupted_does_not_wait_for_its_segment(host: Host, verb: Any) -> None:
    host.hear(push(1, (0,), make_segment()))
    host.hear(cell(2, (0,)))
    host.passed += host.arrivals.interrupt(encode([Parcel(Interrupt(5))]))
    assert host.runs == []
    host.passed += host.arrivals.interrupt(encode([Parcel(verb)]))
    assert host.runs == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        open_segment(host.passed[0].buffers[-1])
    order, frames = host.passed[0]
    assert Lending().lend(order, frames, {0}) == tuple(frames)  # for the rank to raise it
    assert not host.hear(Parcel(Chunk(7, 0, 0), (DATA,)))  # so that no more is sent


def test_run_whose_controller_leaves_fails_with_the_reason(host: Host) -> None:
    host.hear(push(1, (0,), make_segment()))
    host.passed += host.arrivals.abandon("the notebook left")
    assert host.runs == [1]
    with pytest.raises(HostError, match="the notebook left"):
        open_segment(host.passed[0].buffers[-1])


def test_value_that_does_not_fit_fails_its_run(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 100 << 20)
    host.hear(push(1, (0,), make_segment()))
    host.hear(Parcel(Chunk(7, 0, 200 << 20), (DATA,)))
    with pytest.raises(HostError, match=r"2\d\d\.\d MB does not fit where it was to go"):
        open_segment(host.passed[0].buffers[-1])


def test_rank_that_has_ended_leaves_nothing_behind(host: Host) -> None:
    """One that is forked in its place must not get its work."""
    host.hear(push(1, (0,), make_segment()))
    host.hear(cell(2, (0, 1)))
    host.passed += host.arrivals.forget(0)
    assert host.runs == [2]
    assert not host.hear(Parcel(Chunk(7, 0, 0), (DATA,)))


def test_segment_is_not_written_while_its_chunks_are_under_way() -> None:
    pool, sender = SegmentPool("cellmesh-test"), Sender()
    segment = pool.take(len(DATA))
    segment.fill([DATA])
    sender.add(pool.lend(segment, 7, [len(DATA)]), (0,))
    chunk = sender.next(0.0)
    sender.drop(7)
    assert pool.take(len(DATA)) is not segment
    sender.acked([chunk], 0.0)
    del chunk
    assert pool.take(len(DATA)) is segment


def test_dropped_segment_is_sent_no_further() -> None:
    sender = Sender()
    sender.add(make_segment(loan=1), (0,))
    sender.add(make_segment(b"x" * 100, loan=2), (1,))
    first = sender.next(0.0)
    assert sender.givers == {0, 1}
    sender.drop(1)
    second = sender.next(0.0)
    assert [chunk and chunk.verb.loan for chunk in (first, second)] == [1, 2]
    assert sender.next(0.0) is None
    assert not sender


@pytest.mark.parametrize("bytes_per_s", [125e3, 1e6, 12.5e6, 125e6])
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_what_is_under_way_arrives_soon_and_fills_the_link(
    bytes_per_s: float, delay_s: float
) -> None:
    """A link with a rate and a delay; what is sent waits behind what was sent before."""
    window, now, free_at, total = Window(), 0.0, 0.0, 0
    under_way: collections.deque[tuple[float, float, int]] = collections.deque()
    queued_s = []
    while now < 30.0:
        while sum(n for *_, n in under_way) < window.num_bytes:
            size = min(1 << 20, max(32 << 10, window.num_bytes // 4))
            free_at = max(free_at, now) + size / bytes_per_s
            under_way.append((now, free_at + delay_s, size))
        queued_s.append(max(0.0, free_at - now))
        sent_at, now, size = under_way.popleft()
        window.note(size, now - sent_at)
        total += size
    least_s = MIN_WINDOW_BYTES / bytes_per_s
    assert max(queued_s[len(queued_s) // 2 :]) < 0.5 + 2 * least_s
    most = min(bytes_per_s, MAX_WINDOW_BYTES / (delay_s or 1e-9))
    assert total / now > 0.6 * most


@given(st.lists(st.sampled_from(["send", "arrive", "acknowledge", "cut"]), max_size=60))
def test_segment_arrives_over_connections_that_are_cut(events: list[str]) -> None:
    host, sender, frame = Host(), Sender(), make_segment(DATA[: 300 << 10])
    ours: Reliable[list[Parcel[Any]]] = Reliable(lambda message: sender.acked(message, 0.0))
    theirs: Reliable[Any] = Reliable()
    link: collections.deque[tuple[bytes, list[Parcel[Any]]]] = collections.deque()
    order = push(1, (0,), frame)
    link.append((ours.wrap([order], 1), [order]))
    sender.add(frame, (0,))
    for event in [*events, "cut", *["send", "arrive", "acknowledge"] * 40]:
        if event == "send" and (chunk := sender.next(0.0)) is not None:
            link.append((ours.wrap([chunk], 1), [chunk]))
        elif event == "arrive" and link:
            preamble, message = link.popleft()
            if theirs.unwrap(preamble, 1, 0.0):
                host.hear(message[0])
        elif event == "acknowledge":
            ours.unwrap(theirs.wrap_aside(), 0, 0.0)
        elif event == "cut":
            link = collections.deque(ours.resume(theirs.num_received))
    assert host.runs == [1]
    assert value_of(host.passed[0]) == DATA[: 300 << 10]
