"""Types for click's declarations of the magics' options: how each option's words are completed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem
from click.types import IntParamType

# Beyond this, single ranks are not listed: nobody reads them.
_MAX_RANKS = 64


class Choices(NamedTuple):
    """The completions of a word in a magic's line.

    Attributes:
        typed: what of it is there; the choices replace that.
        texts: the choices.
        kind: what they are, in the words of front ends.
    """

    typed: str
    texts: tuple[str, ...]
    kind: str = "instance"


@dataclass(frozen=True)
class NameSources:
    """Where completions that change are looked up: names on ranks, meshes, metrics.

    Args:
        num_ranks: of the mesh; 0 if there is none.
        dims: of the mesh.
        on_ranks: completes an expression on the ranks, given what is typed of it and whether it can
            only be a name.
        in_notebook: gives the names of the notebook.
        meshes: gives the names of living meshes.
        numbers: gives the names of what ranks have reported.
    """

    num_ranks: int
    dims: Mapping[str, int]
    on_ranks: Callable[[str, bool], Choices]
    in_notebook: Callable[[], Iterable[str]]
    meshes: Callable[[], Iterable[str]]
    numbers: Callable[[], Iterable[str]]


Meaning = Callable[[str, NameSources], Choices]


class Text(click.ParamType):  # type: ignore[type-arg]
    """The click type of a text option whose words have completions.

    Args:
        means: gives what could stand at the end of such a text.
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


class Rank(IntParamType):
    """The click type of an option that takes the number of a rank."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        """Return the numbers of ranks in click's form, see `click.ParamType`."""
        return Text(_rank).shell_complete(ctx, param, incomplete)


def _rank(typed: str, sources: NameSources) -> Choices:
    return _starting(typed, map(str, range(sources.num_ranks)))


def words(*texts: str) -> Meaning:
    """Return a completer of these words; the magic refuses others later."""
    return lambda typed, sources: _starting(typed, texts)


def rank_set(typed: str, sources: NameSources) -> Choices:
    """Complete a set of ranks, ``0,2-3``, by another rank; at its start also by all ranks."""
    *before, last = typed.split(",")
    low, dash, high = last.partition("-")
    if dash:
        least = int(low) + 1 if low.isdecimal() else sources.num_ranks
        return _starting(high, map(str, range(least, sources.num_ranks)))
    shown = range(min(sources.num_ranks, _MAX_RANKS))
    singles = [str(rank) for rank in shown if str(rank) not in before]
    if before or sources.num_ranks < 2:
        return _starting(last, singles)
    return _starting(last, ["all", f"0-{sources.num_ranks - 1}", *singles])


def coordinate(typed: str, sources: NameSources) -> Choices:
    """Complete a mesh coordinate, ``tp=0``."""
    *before, last = typed.split(",")
    name, equals, index = last.partition("=")
    if equals:
        return _starting(index, map(str, range(sources.dims.get(name, 0))))
    given = {part.partition("=")[0] for part in before}
    return _starting(last, (f"{dim}=" for dim in sources.dims if dim not in given))


def dims(typed: str, sources: NameSources) -> Choices:
    """Complete dims of a mesh, ``dp=2``."""
    return _starting(typed, (f"{name}=" for name in sources.dims))


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
    # A word with a space in it would be two, unless it is quoted.
    return _starting(name, [text for text in shown if quote or not re.search(r"\s", text)], "path")


def _starting(typed: str, texts: Iterable[str], kind: str = "instance") -> Choices:
    return Choices(typed, tuple(text for text in texts if text.startswith(typed)), kind)
