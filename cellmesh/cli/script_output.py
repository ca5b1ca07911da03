"""Shows the output of a script's ranks, folded on a terminal, unchanged elsewhere; and its end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..controller.failure_summary import exception_of, is_released, summarize
from ..controller.output.console import Sink
from ..controller.output.fold import HOLD_S, Ranks
from ..controller.output.printer import Printer
from ..wire.codec import Parcel
from ..wire.messages import Done, Failed
from ..wire.verbs import InputCancelled, InputRequest, Output, StreamName

# How long the beginning of a line waits for its end, so that lines of ranks do not mix.
LINE_S = 0.2
# How often a wait for input looks whether a rank still waits for it.
_LOOK_S = 0.2

Key = tuple[int, StreamName]
Write = Callable[[StreamName, bytes], None]


class LogFiles:
    """The files with the output of ranks, where torchrun has them: ``attempt_0/3/stdout.log``.

    Args:
        directory: directory of this launch.
        streams: rank -> its streams that are written to files.
        on_error: called once, with the error that makes all later output be left out.
    """

    def __init__(
        self,
        directory: Path,
        streams: Mapping[int, Collection[StreamName]],
        on_error: Callable[[OSError], None],
    ) -> None:
        self.directory, self._on_error = directory, on_error
        self._files: dict[Key, Path] = {}
        for rank, names in streams.items():
            folder = directory / "attempt_0" / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                self._files[rank, name] = folder / f"{name}.log"
                self._files[rank, name].touch()

    def write(self, rank: int, stream: StreamName, data: bytes) -> None:
        """Append output of a rank, if the stream is written to a file."""
        if (path := self._files.get((rank, stream))) is not None:
            try:
                with open(path, "ab") as file:
                    file.write(data)
            except OSError as error:  # the disk is full
                self._files = {}
                self._on_error(error)


class Stdin:
    """Reads this process's standard input when a script asks for it, so that a script which reads
    none leaves it to others, as the loop of a shell.

    Args:
        reply: sends a rank text, or the end of the input (`Runs.reply`).
    """

    def __init__(self, reply: Callable[[Mapping[int, int], str, bool], None]) -> None:
        self._reply = reply
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}  # rank -> the request that waits
        self._has_reader = False

    @property
    def is_asked(self) -> bool:
        """Whether a rank waits for input."""
        return bool(self._asked)

    def ask(self, rank: int, request: int) -> None:
        """Answer a rank's request once there is input, without waiting for it."""
        with self._lock:
            self._asked = {rank: request}
            if not self._has_reader:
                self._has_reader = True
                threading.Thread(target=self._read, name="cellmesh-stdin", daemon=True).start()

    def cancel(self) -> None:
        """Leave the input to a later request, or to others, as no rank waits for it any longer."""
        self._asked = {}

    def _read(self) -> None:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        while True:
            is_there = bool(poll.poll(_LOOK_S * 1000))
            with self._lock:
                if not self._asked:
                    self._has_reader = False
                    return
            if is_there:
                data = b""
                with contextlib.suppress(OSError):  # it is closed, or the terminal is gone
                    data = os.read(0, 1 << 16)  # blocks if another process was faster
                asked, self._asked = self._asked, {}
                if asked:
                    self._reply(asked, data.decode("latin-1"), not data)


class ScriptPrinter(Printer):
    """Prints the output of a script: streams that are no terminal get the ranks' text unchanged.

    Args:
        ranks: ranks of the run.
        sink: shows the streams that are folded.
        write: writes to a stream that is not folded.
        stdin: answers requests of the script for standard input.
        raw: the streams that are not folded.
        hidden: rank -> its streams that are shown nowhere (`LogFiles` may have them).
        logs: files that get the ranks' output as well; None for none.
        folds_numbers: as in `Printer`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        sink: Sink,
        write: Write,
        stdin: Stdin,
        *,
        raw: Collection[StreamName] = (),
        hidden: Mapping[int, Collection[StreamName]] | None = None,
        logs: LogFiles | None = None,
        hold_s: float = HOLD_S,
        folds_numbers: bool = True,
    ) -> None:
        super().__init__(ranks, sink, hold_s=hold_s, folds_numbers=folds_numbers)
        self._write, self._stdin = write, stdin
        self._raw, self._hidden = raw, hidden or {}
        self._logs = logs
        self._begun: dict[Key, tuple[float, bytes]] = {}  # beginnings of lines, and since when

    def feed(self, ranks: Ranks, verb: Any, now: float) -> None:
        """Add a message of these ranks, as `Printer.feed` does."""
        if type(verb) is InputRequest and verb.is_raw:
            super().feed(ranks, verb, now)  # ends the line of a prompt
            self.show(now, everything=True)
            self._stdin.ask(ranks[0], verb.request)
        elif type(verb) is InputCancelled:
            self._stdin.cancel()
        elif type(verb) is Output:
            data = verb.data or verb.text.encode(errors="surrogateescape")
            if self._logs is not None:
                for rank in ranks:
                    self._logs.write(rank, verb.stream, data)
            hidden = self._hidden
            if shown := tuple(r for r in ranks if verb.stream not in hidden.get(r, ())):
                if verb.stream not in self._raw:
                    super().feed(shown, verb, now)
                for rank in shown if verb.stream in self._raw else ():
                    self._add((rank, verb.stream), data, now)
        else:
            super().feed(ranks, verb, now)

    def show(self, now: float, everything: bool = False) -> None:
        """Show the output that is due, or all of it."""
        for key, (since, data) in [*self._begun.items()]:
            if everything or now >= since + LINE_S:
                del self._begun[key]
                self._write(key[1], data)
        super().show(now, everything)

    def status(self, text: str, now: float | None = None) -> None:
        """Show a status line, except while the user may be typing an answer on it."""
        super().status("" if self._stdin.is_asked else text, now)

    def settle(self, ranks: Ranks, verb: Any, now: float, is_shown: bool = True) -> None:
        """Record how these ranks ended the run. The ranks have printed their tracebacks, and a line
        at the end of the launch names those that failed or died.
        """
        super().settle(ranks, verb, now, is_shown=False)

    def finish(self, now: float, is_raised: bool = False) -> None:
        """Record that all ranks have ended the run; their threads may still print."""
        self.show(now, everything=True)
        self._stdin.cancel()
        super().finish(now, is_raised)

    def deadline(self) -> float | None:
        """Return the time from which `show` has more to show, as `Printer.deadline` does."""
        due = [since + LINE_S for since, _ in self._begun.values()]
        folded = super().deadline()
        return min(due if folded is None else [*due, folded], default=None)

    def _add(self, key: Key, data: bytes, now: float) -> None:
        """Write bytes to their stream, except a last line that has no end yet."""
        since, before = self._begun.pop(key, (now, b""))
        data = before + data
        end = data.rfind(b"\n") + 1
        if b"\r" in data[end:]:  # a line that is redrawn, as a progress bar
            end = len(data)
        if end:
            self._write(key[1], data[:end])
        if data[end:]:
            self._begun[key] = (now if end else since, data[end:])


def status_of(ended: Mapping[int, Any]) -> int:
    """Return the exit status for ranks that have ended a script: that of the first that failed, or
    else of the first that was released, as from a rank that has ended early.

    Args:
        ended: rank -> the message with which it ended, in the order of arrival.
    """
    statuses = map(_status, sorted(ended.values(), key=is_released))
    return next((status for status in statuses if status), 0)


def _status(verb: Any) -> int:
    if type(verb) is Done:
        return 0
    if type(verb) is Failed:
        return 130 if verb.type_name == "KeyboardInterrupt" else verb.status or 1
    if found := re.search(r"exited with code (\d+)", verb.reason):
        return int(found[1])
    if found := re.search(r"by signal (\d+)", verb.reason):  # one that has no name
        return 128 + int(found[1])
    found = re.search(r"\bSIG[A-Z0-9]+", verb.reason)
    return 128 + signal.Signals[found[0]] if found and found[0] in signal.Signals.__members__ else 1


def describe_end(ended: Mapping[int, Any]) -> str:
    """Return one line on the ranks that failed, where, and those that waited for them; "" if all
    have finished.
    """
    failed = {rank: verb for rank, verb in ended.items() if type(verb) is not Done}
    # The exceptions of scripts have no payloads, so that none of torch's is imported here.
    exceptions = {rank: exception_of(rank, Parcel(verb)) for rank, verb in failed.items()}
    outcomes = {rank: Parcel(verb) for rank, verb in ended.items()}
    text = summarize(exceptions, outcomes) if failed else ""
    return text.replace("interrupted in the cell", "interrupted")
