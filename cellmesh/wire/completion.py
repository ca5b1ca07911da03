"""Requests for completion and help about code that the user is typing."""

from __future__ import annotations

from dataclasses import dataclass

from .inspect import Query


class Complete(Query, frozen=True):
    """Ask for completions at `cursor` (in characters) in `code`. Answer: `Completions`.

    `users_only`: of names, those that the user has bound, and no builtins or keywords.
    """

    code: str
    cursor: int
    users_only: bool = False


class Explain(Query, frozen=True):
    """Ask for the help of ``obj?`` (`detail` 0) or ``obj??`` (1) on an expression of names,
    attributes and indices.

    Answer: str, with ANSI colours; "" if there is no such thing, or only code could show it.
    """

    name: str
    detail: int = 0


@dataclass(frozen=True)
class Completions:
    """A rank's answer to `Complete`: texts that may replace ``code[begin:end]``, each with its
    kind.

    `is_whole`: nothing else can stand there, as after the dot of something that is known.
    """

    begin: int
    end: int
    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    is_whole: bool = False


AnyRequest = Complete | Explain
