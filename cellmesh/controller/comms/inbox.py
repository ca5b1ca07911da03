"""What the front end has told a rank's widgets, and the rank has not taken in yet; pure.

A slider that is moved while its rank is busy says so many times: of each value, the newest is
passed on. What is not an update of state (a click) keeps its place, and updates do not overtake it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...wire.codec import Frame
from ...wire.messages import CommKind, FromFrontEnd
from ..output.sinks import Publish

# So much else waits at most; what comes then is dropped.
MAX_WAITING = 1000


@dataclass
class Letter:
    """A message of the front end's.

    Attributes:
        comm: to whom.
        kind: what it is.
        data, metadata: as the front end sent them.
        buffers: likewise.
        publish: shows what comes of it, in the cell that made the comm.
    """

    comm: str
    kind: CommKind
    data: dict[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[Frame] = ()
    publish: Publish = lambda kind, content: None

    @property
    def is_update(self) -> bool:
        """Whether it changes a widget's state and does nothing else."""
        return self.kind == "message" and self.data.get("method") == "update"


class Inbox:
    """The messages for one rank, oldest first."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self.num_sent = 0  # that the rank has not taken in

    def __len__(self) -> int:
        return len(self._letters)

    def add(self, letter: Letter) -> bool:
        """Take one in; False if there are too many."""
        if letter.is_update:
            for waiting in reversed(self._letters):
                if not waiting.is_update:
                    break
                if waiting.comm == letter.comm:
                    merge(waiting, letter)
                    return True
        if len(self._letters) >= MAX_WAITING:
            return False
        self._letters.append(letter)
        return True

    def take(self) -> Letter | None:
        """The next, for a rank that has taken in the one before it."""
        return self._letters.pop(0) if self._letters else None

    def drop(self, comm: str | None = None) -> None:
        """Forget what waits for a comm, or for all."""
        self._letters = (
            [] if comm is None else [each for each in self._letters if each.comm != comm]
        )


def letter_verb(letter: Letter) -> tuple[FromFrontEnd, list[Frame]]:
    """As work for the rank, and the frames that go with it."""
    content = json.dumps({"data": letter.data, "metadata": letter.metadata}, default=str).encode()
    verb = FromFrontEnd(0, letter.comm, letter.kind, content, len(letter.buffers))
    return verb, [*letter.buffers]


def merge(older: Letter, newer: Letter) -> None:
    """Make one update of two: the newer's values win."""
    state, paths, buffers = split(newer)
    old_state, old_paths, old_buffers = split(older)
    names = {*state, *(path[0] for path in paths)}
    kept = [
        (path, buffer)
        for path, buffer in zip(old_paths, old_buffers, strict=False)
        if path[0] not in names
    ]
    merged = {name: value for name, value in old_state.items() if name not in names} | state
    older.data = {
        **newer.data,
        "state": merged,
        "buffer_paths": [*(path for path, _ in kept), *paths],
    }
    older.buffers = [*(buffer for _, buffer in kept), *buffers]


def split(letter: Letter) -> tuple[dict[str, Any], list[list[str | int]], Sequence[Frame]]:
    """State, paths of binary values, and those, of an update."""
    return letter.data.get("state", {}), letter.data.get("buffer_paths", []), letter.buffers
