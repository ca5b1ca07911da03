"""The agent's ends of a rank's pipes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from cellmesh.wire.faults import Faults
from cellmesh.workers.agent.events import Events
from cellmesh.workers.agent.rank_link import RankLink

Texts = list[tuple[str, str, bytes]]


@pytest.fixture
def link() -> Iterator[tuple[RankLink, Texts]]:
    """A link whose pipes are read on demand, and the texts that were read."""
    texts: Texts = []
    made = RankLink(Events(Faults("a test", print)), lambda *text: texts.append(text), print, print)
    made.start()
    yield made, texts
    made.close_theirs()
    made.close()


def read_at_once(link: RankLink) -> None:
    link.read_pipes()


def read_at_the_end(link: RankLink) -> None:
    link.close_theirs()
    link.finish()


@pytest.mark.parametrize("read", [read_at_once, read_at_the_end])
def test_all_bytes_before_a_message_are_read_and_kept_if_they_are_no_text(
    link: tuple[RankLink, Texts], read: Callable[[RankLink], None]
) -> None:
    made, texts = link
    pieces = "né\n".encode(), b"\xff\n", "é".encode()[:1], "é".encode()[1:] + b"\n"
    for data in pieces:
        os.write(made.theirs[0], data)
        made.read_pipes()
    os.write(made.theirs[1], b"x" * 60_000)
    read(made)
    assert texts == [
        ("stdout", "né\n", b""),
        ("stdout", "\ufffd\n", b"\xff\n"),
        ("stdout", "", b"\xc3"),
        ("stdout", "é\n", b"\xa9\n"),
        ("stderr", "x" * 60_000, b""),
    ]
