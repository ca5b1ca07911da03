"""A rank asks the user for a line, and the user's answer."""

from __future__ import annotations

from .verb import Verb


class InputRequest(Verb, frozen=True):
    """A run waits for a line of input (``input()``, ``getpass()``, the debugger)."""

    run: int
    request: int
    prompt: str
    is_password: bool = False


class InputCancelled(Verb, frozen=True):
    """The rank no longer waits for an answer: it was interrupted."""

    run: int
    request: int


class InputReply(Verb, frozen=True):
    """The user's answer to a request for input; `is_end` is end of file (Ctrl-D)."""

    request: int
    text: str
    is_end: bool = False
