"""What a rank prints: to its log whole, to the notebook bounded.

`Gate` decides, without clocks or files of its own, what of a stream of text is shown; `Log` is the file with
everything. The rank uses both for what Python prints, the agent for what comes through the rank's
descriptors 1 and 2.
"""

from __future__ import annotations

import collections
import os
from pathlib import Path

from ..wire.messages import Output, Skipped, StreamName

BURST_BYTES = 256 * 1024
BYTES_PER_S = 32 * 1024
# Once output is held back, it is shown again in samples of at least this much.
SAMPLE_BYTES = 4 * 1024
LINE_BYTES = 40
TAIL_LINES = 20
LOG_BYTES = 512 << 20


class Gate:
    """A token bucket over text; what does not pass is counted, and its last lines are kept.

    A line costs its length and `LINE_BYTES`: to a front end, many short lines are as bad as few long ones.

    Args:
        now: seconds, any clock that does not run backwards.
        burst_bytes: how much passes at once.
        bytes_per_s: how much passes in the long run.
    """

    def __init__(self, now: float, burst_bytes: int = BURST_BYTES, bytes_per_s: int = BYTES_PER_S) -> None:
        self._burst = float(burst_bytes)
        self._rate = float(bytes_per_s)
        self._tokens = self._burst
        self._filled_at = now
        self._hidden_run = -1
        self._hidden_stream: StreamName = "stdout"
        self._hidden_lines = 0
        self._hidden_bytes = 0
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def admit(self, run: int, stream: StreamName, text: str, now: float) -> list[Output | Skipped]:
        """Take text in.

        Args:
            run: the run that printed it.
            stream: where to.
            text: a delta.
            now: seconds.

        Returns:
            What to show.
        """
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        shown: list[Output | Skipped] = []
        if self._hidden_bytes and (run != self._hidden_run or stream != self._hidden_stream):
            shown += self.close()
        if not self._hidden_bytes:
            if _cost(text) <= self._tokens:
                self._tokens -= _cost(text)
                shown.append(Output(run, stream, text))
                return shown
            cut = self._affordable(text)
            self._tokens = 0.0
            if cut:
                shown.append(Output(run, stream, text[:cut]))
            text = text[cut:]
        self._hide(run, stream, text)
        if self._tokens >= SAMPLE_BYTES:
            shown += self.close()
        return shown

    def close(self) -> list[Output | Skipped]:
        """Show the note and the last lines of what is hidden; call it when a run ends."""
        if not self._hidden_bytes:
            return []
        tail = "".join(self._tail)[-SAMPLE_BYTES:]
        num_bytes = max(0, self._hidden_bytes - len(tail))
        num_lines = max(0, self._hidden_lines - tail.count("\n"))
        run, stream = self._hidden_run, self._hidden_stream
        self._tokens = max(0.0, self._tokens - _cost(tail))
        self._hidden_lines = self._hidden_bytes = 0
        self._tail.clear()
        note = [Skipped(run, num_lines, num_bytes)] if num_bytes else []
        return [*note, Output(run, stream, tail)]

    def _affordable(self, text: str) -> int:
        """How many characters of a text that is too long may pass; whole lines, if any."""
        left, at = self._tokens, 0
        while (end := text.find("\n", at, at + int(left) + 1)) >= 0:
            if end + 1 - at + LINE_BYTES > left:
                return at
            left -= end + 1 - at + LINE_BYTES
            at = end + 1
        return at or int(left)

    def _hide(self, run: int, stream: StreamName, text: str) -> None:
        self._hidden_run, self._hidden_stream = run, stream
        self._hidden_lines += text.count("\n")
        self._hidden_bytes += len(text)
        self._tail.extend(text[-(2 * SAMPLE_BYTES) :].splitlines(keepends=True))


def _cost(text: str) -> int:
    return len(text) + LINE_BYTES * text.count("\n")


class Log:
    """A rank's log file, appended to by rank and agent; keeps at least the newest `limit_bytes`.

    Args:
        path: the file; its predecessor, once it is full, is ``path`` + ``.1``.
        limit_bytes: size at which it is turned over.
    """

    def __init__(self, path: Path, limit_bytes: int = LOG_BYTES) -> None:
        self._path = path
        self._limit = limit_bytes
        self._descriptor = -1

    def append(self, text: str) -> None:
        """Append text; a full disk or a removed directory loses text, never the rank."""
        data = text.encode(errors="replace")
        try:
            self._open()
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return

    def _open(self) -> None:
        if self._descriptor >= 0:
            facts = os.fstat(self._descriptor)
            if facts.st_size >= self._limit:
                os.replace(self._path, f"{self._path}.1")
            elif facts.st_nlink and os.stat(self._path).st_ino == facts.st_ino:
                return
            os.close(self._descriptor)
            self._descriptor = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)


def read_log(path: Path, num_bytes: int) -> tuple[str, int]:
    """Read the end of a rank's log.

    Args:
        path: the log's path, as given to `Log`.
        num_bytes: how much at most.

    Returns:
        The text, and how many bytes lie before it.
    """
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
