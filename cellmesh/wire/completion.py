"""Completion and help: what a notebook asks a rank about code that is being written."""

from __future__ import annotations

from dataclasses import dataclass

from .inspect import Query


class Complete(Query, frozen=True):
    """What could stand at `cursor` (in characters) in `code`. Answer: `Completions`.

    `users_only`: of names, those that the user has bound, and no builtins or keywords.
    """

    code: str
    cursor: int
    users_only: bool = False


class Explain(Query, frozen=True):
    """What ``obj?`` (`detail` 0) and ``obj??`` (1) show of an expression of names, attributes and
    indices.

    Answer: str, with ANSI colours; "" if there is no such thing, or only code could tell.
    """

    name: str
    detail: int = 0


@dataclass(frozen=True)
class Completions:
    """What could replace ``code[begin:end]``: texts, and what each is (``function``, ``instance``,
    ...).

    `is_whole`: nothing else can stand there, as after the dot of something that is known.
    """

    begin: int
    end: int
    texts: tuple[str, ...]
    kinds: tuple[str, ...]
    is_whole: bool = False


AnyRequest = Complete | Explain
