"""Requests input from the notebook's user: ``input()``, ``getpass()``, the debugger's prompt.

The request is sent to the notebook; the asking thread waits, and an interrupt ends the wait.
"""

from __future__ import annotations

import builtins
import getpass
import io
from collections.abc import Callable
from typing import Any

from ...stdlib import os, threading
from ...wire.codec import Parcel
from ...wire.verbs import InputCancelled, InputRequest
from ..run_tracker import RunTracker
from .shell import RankShell

# Interval at which an asking thread checks whether its run still executes.
_LOOK_S = 0.5
_MAX_PROMPT = 10_000
PLAIN_INPUT, PLAIN_GETPASS = builtins.input, getpass.getpass


class _Question:
    """One request to the user for a line of input; `answered` is set once `text` and `is_end` have
    been set.
    """

    def __init__(self, request: int) -> None:
        self.request = request
        self.answered = threading.Event()
        self.text = ""
        self.is_end = False


class Asker:
    """Sends a rank's requests for input to the user, one at a time."""

    def __init__(self, send: Callable[[Parcel[Any]], None], tracker: RunTracker) -> None:
        self._send = send
        self._tracker = tracker
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._question: _Question | None = None
        self._num_asked = 0

    @property
    def is_asking(self) -> bool:
        """Whether a thread of this rank waits for input."""
        return self._question is not None

    def install(self, shell: RankShell) -> None:
        """Replace ``input()``, ``getpass()`` and IPython's prompts on this rank by requests to the
        notebook's user.
        """

        def ask(prompt: object = "", /) -> str:
            return self.ask(str(prompt))

        def ask_password(prompt: str = "Password: ", stream: Any = None, **kwargs: Any) -> str:
            return self.ask(prompt, is_password=True)

        ask.__doc__, ask.__name__ = builtins.input.__doc__, "input"
        ask_password.__doc__, ask_password.__name__ = getpass.getpass.__doc__, "getpass"
        builtins.input = ask
        getpass.getpass = ask_password
        shell.ask = self.ask

    def ask(self, prompt: str, is_password: bool = False, is_raw: bool = False) -> str:
        """Request a line of input from the user, or bytes (`is_raw`), and wait for it.

        Raises:
            EOFError: the user ended the input (Ctrl-D), the front end supports none, or the cell
                has ended.
            RuntimeError: the caller does not belong to the running cell.
            KeyboardInterrupt: the run was interrupted or released.
        """
        run = self._tracker.current()
        if os.getpid() != self._pid:
            raise RuntimeError("input() cannot ask from a process that the rank has started")
        if run < 0 or run != self._tracker.main_run:
            raise RuntimeError("input() can ask only while the cell runs that it belongs to")
        with self._turn:
            self._num_asked += 1
            question = self._question = _Question(self._num_asked)
            try:
                end = prompt[-_MAX_PROMPT:]
                self._send(Parcel(InputRequest(run, question.request, end, is_password, is_raw)))
                while not question.answered.wait(_LOOK_S):
                    if run != self._tracker.main_run:
                        raise EOFError("the cell that asked has ended")
            except BaseException:
                self._send(Parcel(InputCancelled(run, question.request)))
                raise
            finally:
                self._question = None
        if question.is_end:
            raise EOFError(question.text or "the input was ended")
        return question.text

    def reply(self, request: int, text: str, is_end: bool) -> None:
        """Take the user's answer to a request for input; called by the control thread."""
        question = self._question
        if question is not None and question.request == request:
            question.text, question.is_end = text, is_end
            question.answered.set()


def open_script_input(ask: Callable[..., str]) -> io.TextIOWrapper:
    """Open the standard input of a script; `ask` is `Asker.ask`."""
    stream = io.TextIOWrapper(io.BufferedReader(_ScriptInput(ask)), "utf-8")
    vars(stream)["mode"] = "r"  # as Python's own has
    return stream


class _ScriptInput(io.RawIOBase):
    """The bytes of standard input, requested from the controller as a script reads them: they may
    be meant for another program.
    """

    def __init__(self, ask: Callable[..., str]) -> None:
        self._ask, self._left = ask, b""

    @property
    def name(self) -> str:
        return "<stdin>"

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the rank's descriptor 0, which is empty."""
        return 0

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            try:
                self._left = self._ask("", is_raw=True).encode("latin-1")
            except EOFError:
                return 0
        with memoryview(buffer).cast("B") as view:
            size = min(len(view), len(self._left))
            view[:size], self._left = self._left[:size], self._left[size:]
        return size
