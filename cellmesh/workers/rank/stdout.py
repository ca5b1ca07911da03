"""Writes a rank's printed text to its log, and limits the text that is sent to the notebook.

`Gate` chooses, without clocks or files of its own, the part of a stream that is shown; `Log` is the
file with the complete text. The rank uses both for text that Python prints, the agent for text of
the rank's descriptors 1 and 2.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from pathlib import Path

from ...stdlib import open, os
from ...wire.verbs import Output, Skipped, StreamName

BURST_BYTES = 256 * 1024
BYTES_PER_S = 32 * 1024
# Once output is held back, it is shown in samples of at least this size.
SAMPLE_BYTES = 4 * 1024
LINE_BYTES = 40
TAIL_LINES = 20
# Maximum size of a log, and of its predecessor.
LOG_BYTES = 64 << 20


@dataclass
class _Hidden:
    """Printed text that exceeded the limit and was not sent to the notebook: its size and last
    lines.
    """

    num_lines: int = 0
    num_bytes: int = 0
    tail: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=TAIL_LINES)
    )


class Gate:
    """Limits the printed text that a rank sends to the notebook, by a token bucket for each stream;
    of the excess text, only its size and last lines are kept.

    A line costs its length plus `LINE_BYTES`, as many short lines burden a front end as much as few
    long ones. Each stream has its own bucket, so that a flood on stdout does not hide a traceback
    that a thread or a library writes to stderr.

    Attributes:
        hides: (run, stream) -> its text that was not shown.
    """

    def __init__(
        self, now: float, burst_bytes: int = BURST_BYTES, bytes_per_s: int = BYTES_PER_S
    ) -> None:
        self._burst = float(burst_bytes)
        self._rate = float(bytes_per_s)
        self._tokens: dict[StreamName, float] = {"stdout": self._burst, "stderr": self._burst}
        self._filled_at = now
        self.hides: dict[tuple[int, StreamName], _Hidden] = {}

    def admit(self, run: int, stream: StreamName, text: str, now: float) -> list[Output | Skipped]:
        """Return messages with the part of a run's newly printed text that the limit allows to send
        now.
        """
        earned = (now - self._filled_at) * self._rate
        self._tokens = {
            name: min(self._burst, tokens + earned) for name, tokens in self._tokens.items()
        }
        self._filled_at = now
        shown: list[Output | Skipped] = []
        if (run, stream) not in self.hides:
            if _cost(text) <= self._tokens[stream]:
                self._tokens[stream] -= _cost(text)
                return [Output(run, stream, text)]
            cut = _affordable(text, int(self._tokens[stream]))
            self._tokens[stream] = 0.0
            if cut:
                shown.append(Output(run, stream, text[:cut]))
            text = text[cut:]
        self._hide(run, stream, text)
        if self._tokens[stream] >= SAMPLE_BYTES:
            shown += self._show_hidden(run, stream)
        return shown

    def close(self) -> list[Output | Skipped]:
        """Return messages with the size and the last lines of text that the limit held back; to be
        called when a run ends.
        """
        return [verb for key in list(self.hides) for verb in self._show_hidden(*key)]

    def _hide(self, run: int, stream: StreamName, text: str) -> None:
        hidden = self.hides.setdefault((run, stream), _Hidden())
        hidden.num_lines += text.count("\n")
        hidden.num_bytes += _num_bytes(text)
        hidden.tail.extend(text[-(2 * SAMPLE_BYTES) :].splitlines(keepends=True))

    def _show_hidden(self, run: int, stream: StreamName) -> list[Output | Skipped]:
        hidden = self.hides.pop((run, stream))
        encoded = "".join(hidden.tail).encode(errors="replace")
        tail = encoded[-SAMPLE_BYTES:].decode(errors="ignore")
        self._tokens[stream] = max(0.0, self._tokens[stream] - _cost(tail))
        num_bytes = hidden.num_bytes - _num_bytes(tail)
        num_lines = max(0, hidden.num_lines - tail.count("\n"))
        return [
            *([Skipped(run, num_lines, num_bytes)] if num_bytes > 0 else []),
            *([Output(run, stream, tail)] if tail else []),
        ]


def _affordable(text: str, left: int) -> int:
    """Return how many characters of a text the remaining tokens allow: whole lines, if at least one
    fits.
    """
    at = 0
    while (end := text.find("\n", at, at + left + 1)) >= 0:
        line_cost = _cost(text[at : end + 1])
        if line_cost > left:
            return at
        left -= line_cost
        at = end + 1
    return at or len(text[:left].encode(errors="replace")[:left].decode(errors="ignore"))


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def _cost(text: str) -> int:
    return _num_bytes(text) + LINE_BYTES * text.count("\n")


class Log:
    """A rank's log file, to which rank and agent append; it is rotated, and keeps at least the
    newest `limit_bytes`.
    """

    def __init__(self, path: Path, limit_bytes: int = LOG_BYTES) -> None:
        self._path = path
        self._limit = limit_bytes
        self._descriptor = -1

    def append(self, text: str) -> None:
        """Append text to the log; it is lost if the disk is full or the directory was removed."""
        data = text.encode(errors="replace")
        try:
            while data:
                self._open()
                data = data[os.write(self._descriptor, data[: self._limit]) :]
        except OSError:
            return

    def position(self) -> tuple[int, int]:
        """Return the current end of the log file, for a later call of `Log.num_bytes_since`."""
        try:
            facts = os.stat(self._path)
        except OSError:
            return 0, 0
        return facts.st_ino, facts.st_size

    def num_bytes_since(self, position: tuple[int, int]) -> int:
        """Return how many bytes were appended to the log since a position; if the log was rotated
        since, only those in the new file.
        """
        inode, size = self.position()
        return size - position[1] if inode == position[0] else size

    def _open(self) -> None:
        if self._descriptor >= 0:
            facts = os.fstat(self._descriptor)
            if self._is_current(facts):
                if facts.st_size < self._limit:
                    return
                os.replace(self._path, f"{self._path}.1")
            os.close(self._descriptor)
            self._descriptor = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)

    def _is_current(self, facts: os.stat_result) -> bool:
        """Return whether the open file is still the log, which may have been rotated or removed."""
        try:
            return os.stat(self._path).st_ino == facts.st_ino
        except FileNotFoundError:
            return False


def read_log(path: Path, num_bytes: int) -> tuple[str, int]:
    """Read the end of a rank's log; return the text, and the number of bytes before it."""
    pieces: list[bytes] = []
    left, before = num_bytes, 0
    for part in (path, path.with_name(path.name + ".1")):
        try:
            with open(part, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                take = min(size, left)
                file.seek(size - take)
                pieces.insert(0, file.read(take))
        except OSError:
            continue
        left -= take
        before += size - take
    return b"".join(pieces).decode(errors="replace"), before
