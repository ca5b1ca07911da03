"""Messages in which a rank asks the user for a line of input, and gets the answer."""

from __future__ import annotations

from .verb import Verb


class InputRequest(Verb, frozen=True):
    """A rank asks the user for a line of input (``input()``, ``getpass()``, the debugger)."""

    run: int
    request: int
    prompt: str
    is_password: bool = False


class InputCancelled(Verb, frozen=True):
    """A rank no longer waits for the answer to its `InputRequest`: it was interrupted."""

    run: int
    request: int


class InputReply(Verb, frozen=True):
    """The user's answer to an `InputRequest`; `is_end` is end of file (Ctrl-D)."""

    request: int
    text: str
    is_end: bool = False
