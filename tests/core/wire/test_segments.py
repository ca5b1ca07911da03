"""Segments: what is opened, mapped and given is let go, whatever happens in between."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.errors import HostError
from cellmesh.wire import segments
from cellmesh.wire.codec import Frame, Parcel
from cellmesh.wire.faults import Faults
from cellmesh.wire.messages import Done, Failed, Pickled
from cellmesh.wire.segments import MIN_BYTES, SegmentFrame
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.rank_link import Lending, RankLink
from cellmesh.workers.rank.value_transfer import SegmentLink

NAME = "cellmesh-result"


def make_segment() -> SegmentFrame:
    memfd = segments.create(MIN_BYTES, NAME)
    segments.write(memfd, [b"y" * MIN_BYTES])
    return SegmentFrame.of(memfd, 1, [MIN_BYTES])


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count(NAME)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOENT, "that process has ended"),
        (errno.EACCES, "another user"),
        (errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_why_a_segment_does_not_open(
    number: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    frame = bytes(make_segment())
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(HostError) as caught:
        segments.open_segment(frame)
    monkeypatch.undo()
    assert told in str(caught.value)
    assert ("has ended" in str(caught.value)) is (number == errno.ENOENT)


def test_an_interrupt_at_any_instant_of_a_mapping_leaves_none_behind() -> None:
    frame = make_segment()

    def map_struck(at: int) -> int:
        """Map, with Ctrl-C at an instruction; how many instructions there were."""
        num_seen = 0

        def trace(own: types.FrameType, event: str, arg: Any) -> Any:
            nonlocal num_seen
            if own.f_code.co_filename != segments.__file__:
                return None
            own.f_trace_opcodes = True
            num_seen += 1
            if num_seen == at + 1:
                signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            buffers = segments.map_private(frame)
        except KeyboardInterrupt:
            return num_seen
        finally:
            sys.settrace(before)
        assert bytes(buffers[0][:2]) == b"yy"
        return num_seen

    for at in range(map_struck(1 << 30)):
        map_struck(at)
        assert not num_mapped(), f"struck at instruction {at}"


class Ends:
    """Both ends of what connects a rank with its agent, in one process."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        events, no = Events(Faults("a test", print)), lambda *args: None
        self.agent = RankLink(events, no, self.news.append, no)
        self.rank = SegmentLink(socket.socket(fileno=os.dup(self.agent.theirs[-1])))
        self.lending = Lending()

    def give(self, run: int) -> tuple[Pickled, list[Frame]]:
        return self.rank.give(run, Pickled(b"x", 1), [b"y" * MIN_BYTES])

    def close(self) -> None:
        self.rank._connection.close()
        self.agent.close_theirs()
        self.agent.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def num_open() -> int:
    """How many results are open to be read; the rank in this process keeps them open to write."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [link for link in links if os.path.exists(link) and NAME in os.readlink(link)]
    return sum(not fcntl.fcntl(int(Path(link).name), fcntl.F_GETFL) & os.O_RDWR for link in found)


def test_results_of_an_interrupted_run_are_released(ends: Ends) -> None:
    """The interrupt strikes between the passing of the segment and the answer that would name
    it.
    """
    for run in (1, 2):
        ends.give(run)
    ends.lending.note(0, Parcel(Failed(1, "KeyboardInterrupt", "", "", 0)), ends.agent)
    assert num_open() == 1
    pickled, buffers = ends.give(3)
    for run in (2, 3):
        answer = ends.lending.note(0, Parcel(Done(run, pickled), tuple(buffers)), ends.agent)
        assert isinstance(answer.buffers[0], SegmentFrame)
        assert not os.get_inheritable(answer.buffers[0].memfd.descriptor)
        assert num_open() == 1
        del answer
        assert num_open() == 0


def test_a_rank_gives_some_values_only_ahead_of_an_agent_that_does_not_read(ends: Ends) -> None:
    ends.rank._connection.setblocking(False)
    given = [ends.give(run)[0].is_mapped for run in range(20)]  # what does not fit goes in frames
    assert 2 <= sum(given) <= 10
    assert given == sorted(given, reverse=True)


def test_descriptors_that_are_received_are_not_passed_to_programs() -> None:
    found = [
        (path.name, "MSG_CMSG_CLOEXEC" in call)  # which `socket.recv_fds` passes over
        for path in Path(cm.__file__).parent.rglob("*.py")
        for call in re.findall(r"\.recv(?:_fds|msg)\((.{0,100})", path.read_text(), re.DOTALL)
    ]
    assert found
    assert all(is_closed for _, is_closed in found), found
