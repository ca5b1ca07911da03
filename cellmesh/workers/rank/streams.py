"""A rank's `sys.stdout`, `sys.stderr` and displays: sends output to the notebook, with the number
of the run (cell or call) that it belongs to.

A line belongs to the run that caused it: the run that the main thread executes, or, for a thread or
an asyncio task, the run that started it, however late it prints. In a process that user code forked
(a DataLoader's worker), the streams write to descriptors 1 and 2, which the agent reads.
"""

from __future__ import annotations

import base64
import codecs
import collections
import contextlib
import contextvars
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from ...stdlib import os, threading, time
from ...wire.codec import Parcel
from ...wire.messages import Done, Failed
from ...wire.verbs import Display, DisplayKind, Output, StreamName
from ..run_tracker import RunTracker
from .stdout import Gate, Log

# How long text is collected before it is sent, so that a loop of prints sends few messages.
GATHER_S = 0.02
_INLINE_FLUSH_BYTES = 1 << 20
# Token bucket for displays, in bytes: kernel and page keep all displays that were sent. As
# thousands of them overload a front end, each costs at least the minimum; except a cell's value, of
# which there is one, and updates, which replace each other.
DISPLAY_BYTES = 32 << 20
_DISPLAY_BYTES_PER_S = 2 << 20
_MIN_DISPLAY_BYTES = 100 << 10
DISPLAY_BOUND = (
    f"a rank's displays pass up to {DISPLAY_BYTES >> 20} MiB at once "
    f"and {_DISPLAY_BYTES_PER_S >> 20} MiB/s"
)
_MAX_TEXT = 1000
# How long an answer waits for answers of the following runs, and at which multiples of run numbers
# it does not: the same on all ranks, as the agent merges equal messages at little cost.
_MORE_FOLLOWS_S = 0.005
_MAX_ANSWERS = 16
# How long a process that is to be started waits for the agent at most, and how often it looks.
_READ_S, _LOOK_S = 0.5, 0.0005
# Python's audit events of calls that start processes.
_STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")

# Variables by which matplotlib and plotly, as they are imported, choose to show in a notebook. On a
# rank, plotly would choose to send 5 MB of JavaScript.
DISPLAYS = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PLOTLY_RENDERER": "plotly_mimetype",
}

Post = Callable[[Sequence[Parcel[Any]]], None]


class Pump:
    """Collects the text that a rank prints, writes all of it to the log, and sends it to the
    notebook up to a limit.
    """

    def __init__(
        self, post: Post, log: Log, shield: AbstractContextManager[Any, Any] | None = None
    ) -> None:
        # Context in which interrupts are deferred.
        self._shield = shield or contextlib.nullcontext()
        # Called under the lock, so that messages are sent in the order of the calls.
        self._post = post
        self._log = log
        self._gate = Gate(time.monotonic())
        self._precedes_children = False
        # Returns the number of bytes that the agent has not read yet.
        self.num_unread: Callable[[], int] = lambda: 0
        self.is_whole = False  # whether all text is sent, without a limit
        self._lock = threading.RLock()
        # Appended to without the lock, as a print must be cheap; `_flush` takes from the other end.
        self._pieces: collections.deque[tuple[int, StreamName, str]] = collections.deque()
        self._num_gathered = 0
        self._flushed_at = 0.0
        self._is_due = False
        self._deferred: list[Parcel[Any]] = []
        self._due = threading.Event()
        self._pid = os.getpid()  # differs in a forked child, which must not use the rank's sockets
        self._display_bytes = float(DISPLAY_BYTES)
        self._displayed_at = 0.0
        os.register_at_fork(after_in_child=self._renew_lock)

    def start(self) -> None:
        """Start the thread that sends collected text."""
        threading.Thread(target=self._post_gathered, name="cellmesh-output", daemon=True).start()

    def divert(self, choose: Callable[[Sequence[Parcel[Any]]], Sequence[Parcel[Any]]]) -> None:
        """From now on, send only the messages that a function returns of those to be sent."""
        post = self._post
        self._post = lambda parcels: post(kept) if (kept := choose(parcels)) else None

    def write(self, run: int, stream: StreamName, text: str) -> None:
        """Add text that a run has printed to a stream, to be sent soon."""
        if os.getpid() != self._pid:
            os.write(1 if stream == "stdout" else 2, text.encode(errors="replace"))
            return
        self._pieces.append((run, stream, text))
        self._num_gathered += len(text)
        if self._is_due and self._num_gathered < _INLINE_FLUSH_BYTES:
            return
        with self._shield, self._lock:
            # Send the first line after a pause at once.
            paused = time.monotonic() - self._flushed_at > GATHER_S
            if paused or self._num_gathered >= _INLINE_FLUSH_BYTES:
                self._flush()
            elif not self._is_due:
                self._is_due = True
                self._due.set()

    def send(self, parcel: Parcel[Any]) -> None:
        """Send a message of the rank, after all text that was printed before it."""
        if os.getpid() != self._pid:
            return
        with self._shield, self._lock:
            if self._pieces or self._deferred:
                self._flush()
            self._deferred.append(parcel)
            self._flush()

    def answer(self, parcel: Parcel[Any], more_follows: bool = False) -> None:
        """Send a run's answer after all text of the run; if another run follows at once, perhaps
        together with its answer.

        Only the rank calls it, not its forked children (`Executor.execute`).
        """
        more_follows = more_follows and parcel.verb.run % _MAX_ANSWERS > 0
        with self._lock:
            if not (more_follows or self._pieces or self._deferred or self._gate.hides):
                self._post((parcel,))
                return
            if self._pieces:
                self._flush(and_post=False)
            if self._gate.hides:
                self._deferred += [Parcel(verb) for verb in self._gate.close()]
            self._deferred.append(parcel)
            if not more_follows:
                self._flush()
            elif not self._due.is_set():
                self._due.set()

    def has_answered(self, run: int) -> bool:
        """Return whether the answer to a run is queued and has not been sent yet."""
        return any(type(verb) in (Done, Failed) and verb.run == run for verb, _ in self._deferred)

    def precede_children(self) -> None:
        """From now on, whenever this process starts another, first let the agent read the text so
        far, as it reads text of the other from a pipe.
        """
        if self._precedes_children:
            return
        self._precedes_children = True

        def hear(event: str, _: object) -> None:
            if event in _STARTS and os.getpid() == self._pid:
                self.flush()
                until = time.monotonic() + _READ_S
                while self.num_unread() and time.monotonic() < until:
                    time.sleep(_LOOK_S)

        sys.addaudithook(hear)

    def flush(self) -> None:
        """Send all collected text and queued messages now."""
        if os.getpid() != self._pid or not (self._pieces or self._deferred):
            return
        with self._shield, self._lock:
            self._flush()

    def display(self, parcel: Parcel[Display], describe: Callable[[], str]) -> None:
        """Send a rich display to the notebook; if it exceeds the limit, print the text that
        `describe` returns instead.
        """
        verb = parcel.verb
        num_bytes = len(verb.bundle)
        cost = max(num_bytes, _MIN_DISPLAY_BYTES) if verb.kind == "display" else num_bytes
        with self._shield, self._lock:
            now = time.monotonic()
            earned = (now - self._displayed_at) * _DISPLAY_BYTES_PER_S
            left = min(DISPLAY_BYTES, self._display_bytes + earned)
            may_show = cost <= left and os.getpid() == self._pid
            self._display_bytes, self._displayed_at = left - may_show * cost, now
        if may_show:
            self.send(parcel)
            return
        text = describe()
        if num_bytes > _MIN_DISPLAY_BYTES:
            text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
            text += f" ({num_bytes:,} bytes, not shown: {DISPLAY_BOUND})"
        self.write(verb.run, "stdout", text + "\n")

    def _flush(self, and_post: bool = True) -> None:
        self._is_due = False
        if self._pieces:
            # A signal handler of user code may print, and so flush, between any two of them.
            pieces = [self._pieces.popleft() for _ in range(len(self._pieces)) if self._pieces]
            self._num_gathered = 0
            now = time.monotonic()
            self._flushed_at = now
            self._log.append("".join(text for _, _, text in pieces))
            for run, stream, text in _join(pieces):
                whole = [Output(run, stream, text)] if self.is_whole else None
                self._deferred += [
                    Parcel(verb) for verb in whole or self._gate.admit(run, stream, text, now)
                ]
        if and_post and self._deferred:
            self._post(self._deferred)
            self._deferred = []

    def _post_gathered(self) -> None:
        while True:
            with contextlib.suppress(BaseException):  # else the rank's output would stop for good
                self._due.wait()
                time.sleep(GATHER_S if self._pieces else _MORE_FOLLOWS_S)
                self._due.clear()
                with self._lock:
                    self._flush()

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a thread that the fork does not have may have held it


def _join(pieces: Iterable[tuple[int, StreamName, str]]) -> list[tuple[int, StreamName, str]]:
    joined: list[tuple[int, StreamName, list[str]]] = []
    for run, stream, text in pieces:
        if joined and joined[-1][:2] == (run, stream):
            joined[-1][2].append(text)
        else:
            joined.append((run, stream, [text]))
    return [(run, stream, "".join(texts)) for run, stream, texts in joined]


class RankStream(io.TextIOWrapper):
    """A rank's `sys.stdout` or `sys.stderr`, whose text appears below the cell that printed it.

    Attributes:
        is_terminal: whether ``isatty()`` is true.
    """

    is_terminal = False

    def __init__(self, name: StreamName, pump: Pump, tracker: RunTracker) -> None:
        self._stream: StreamName = name
        self._pump = pump
        self._tracker = tracker
        super().__init__(_ByteStream(self, name), "utf-8", "replace", write_through=True)
        vars(self)["mode"] = "w"

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._pump.write(self._tracker.current(), self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Write the text printed so far to the log, so that it survives a crash, as ``print(...,
        flush=True)`` requires.
        """
        self._pump.flush()


class _ByteStream(io.RawIOBase):
    def __init__(self, stream: RankStream, name: StreamName) -> None:
        self._stream, self._descriptor = stream, 1 if name == "stdout" else 2
        self.name = f"<{name}>"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the rank's descriptor 1 or 2, to which subprocesses may write; it is a pipe that
        the agent reads.
        """
        return self._descriptor

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._stream.write(self._decoder.decode(view.tobytes()))
        return view.nbytes


# Source of the cell, and whether the value of its last expression is dropped.
CELL: contextvars.ContextVar[tuple[str, bool]] = contextvars.ContextVar(
    "cellmesh_cell", default=("", False)
)
Show = Callable[[DisplayKind, bytes, str], None]


# Memory address of an object, which differs between ranks that show the same object.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_NO_WIDGETS = "(a rank's widget is its text: pull the values, and make the widget in the notebook)"


def _to_bundle(data: dict[str, Any], metadata: dict[str, Any] | None) -> bytes:
    text = data.get("text/plain")
    if _WIDGET in data:
        data, metadata = {"text/plain": f"{text}\n{_NO_WIDGETS}"}, None
    if len(data) > 1 and isinstance(text, str) and " at 0x" in text:
        data = {**data, "text/plain": _ADDRESS.sub(">", text)}
    return json.dumps({"data": data, "metadata": metadata or {}}, default=_jsonable).encode()


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):  # an image, which Jupyter transfers as base64 text
        return base64.b64encode(value).decode()
    return repr(value)


class RankDisplayHook(DisplayHook):
    """Sends the value of a cell's last expression as a display."""

    def quiet(self) -> bool:
        source, is_quiet = CELL.get()
        ends_quietly = self.semicolon_at_end_of_expression(source)  # type: ignore[no-untyped-call]
        return is_quiet or bool(ends_quietly)

    def start_displayhook(self) -> None: ...

    def write_output_prompt(self) -> None: ...

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        shell: Any = self.shell
        shell.show("result", _to_bundle(format_dict, md_dict), "")

    def finish_displayhook(self) -> None: ...


class RankDisplayPublisher(DisplayPublisher):
    """Sends the arguments of ``display(...)`` as displays."""

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        display_id = str((transient or {}).get("display_id", ""))
        self.shell.show("update" if update else "display", _to_bundle(data, metadata), display_id)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.show("clear", b"wait" if wait else b"", "")
