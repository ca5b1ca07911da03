"""Click types of the magics' options and arguments, which complete their words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem


class Choices(NamedTuple):
    """The completions of a word in a magic's line.

    Attributes:
        typed: typed part of the word, which the choices replace.
        texts: the choices.
        kind: kind of the choices, in front ends' terms.
    """

    typed: str
    texts: tuple[str, ...]
    kind: str = "instance"


@dataclass(frozen=True)
class NameSources:
    """Functions that look up completions that change: names on ranks, meshes, metrics.

    Args:
        on_ranks: completes an expression on the ranks, given its typed part and whether it can only
            be a name.
        in_notebook: returns the names of the notebook.
        meshes: returns the names of running meshes.
        numbers: returns the names of the metrics that ranks have logged.
    """

    on_ranks: Callable[[str, bool], Choices]
    in_notebook: Callable[[], Iterable[str]]
    meshes: Callable[[], Iterable[str]]
    numbers: Callable[[], Iterable[str]]


Meaning = Callable[[str, NameSources], Choices]


class Text(click.ParamType):  # type: ignore[type-arg]
    """The click type of a text option whose words have completions.

    Args:
        means: returns the completions of the end of such a text.
    """

    name = "text"

    def __init__(self, means: Meaning) -> None:
        self._means = means

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        """Return the completions of a word in click's form, see `click.ParamType`."""
        found = self._means(incomplete, ctx.obj)
        return [CompletionItem(text, found.kind, typed=found.typed) for text in found.texts]


def expression(typed: str, sources: NameSources) -> Choices:
    """Complete an expression of names on ranks."""
    return sources.on_ranks(typed, False)


def names(typed: str, sources: NameSources) -> Choices:
    """Complete the name of a variable on ranks."""
    return sources.on_ranks(typed, True)


def names_and_file(typed: str, sources: NameSources) -> Choices:
    """Complete names of variables on ranks, then a file."""
    files = file(typed, sources)
    if files.typed != typed:  # in a folder, or in quotes
        return files
    return Choices(typed, (*sources.on_ranks(typed, True).texts, *files.texts))


def notebooks_names(typed: str, sources: NameSources) -> Choices:
    """Complete the name of a variable of the notebook."""
    return _starting(typed, sources.in_notebook())


def meshes(typed: str, sources: NameSources) -> Choices:
    """Complete the name of a running mesh."""
    return _starting(typed, sources.meshes())


def numbers(typed: str, sources: NameSources) -> Choices:
    """Complete the name of a metric that ranks have logged."""
    return _starting(typed, sources.numbers())


def file(typed: str, sources: NameSources) -> Choices:
    """Complete files and folders; hidden ones only after a dot."""
    quote = typed[0] if typed[:1] in ("'", '"') else ""
    folder, name = os.path.split(typed.removeprefix(quote))
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return Choices(name, ())
    texts = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
    shown = [text for text in texts if name.startswith(".") or not text.startswith(".")]
    # A word with a space would be read as two, unless it is quoted.
    return _starting(name, [text for text in shown if quote or not re.search(r"\s", text)], "path")


def _starting(typed: str, texts: Iterable[str], kind: str = "instance") -> Choices:
    return Choices(typed, tuple(text for text in texts if text.startswith(typed)), kind)
