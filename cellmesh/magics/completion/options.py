"""What could stand at the end of a magic's line, by the options' declarations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ..options import COMMANDS, words_of
from .meanings import Meaning

# Beyond this, single ranks are not listed: nobody reads them.
_MAX_RANKS = 64
_LINE = re.compile(r"^\s*(?:\w+\s*=\s*)?%{1,2}(\w+)\s(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Choices:
    """What could stand at the end of a line.

    Attributes:
        typed: what of it is there; the choices replace that.
        texts: the choices.
        kind: what they are, in the words of front ends.
    """

    typed: str
    texts: tuple[str, ...]
    kind: str = "instance"


@dataclass(frozen=True)
class Sources:
    """Where choices come from that change.

    Args:
        num_ranks: of the mesh; 0 if there is none.
        dims: of the mesh.
        on_ranks: completes an expression on the ranks, given what is typed of it and whether it can
            only be a name: what of that the texts replace, and the texts.
        in_notebook: gives the names of the notebook.
        meshes: gives the names of living meshes.
        numbers: gives the names of what ranks have reported.
    """

    num_ranks: int
    dims: Mapping[str, int]
    on_ranks: Callable[[str, bool], tuple[str, Iterable[str]]]
    in_notebook: Callable[[], Iterable[str]]
    meshes: Callable[[], Iterable[str]]
    numbers: Callable[[], Iterable[str]]


def complete_line(text: str, sources: Sources) -> Choices | None:
    """What could stand at the end of a magic's line.

    Args:
        text: the line up to the cursor, with the magic and its ``%``.
        sources: where choices come from that change.

    Returns:
        The choices; None if it is no line of ours, or nothing is known of what could stand there.
    """
    match = _LINE.match(text)
    if match is None or match[1] not in COMMANDS:
        return None
    command, line = COMMANDS[match[1]], match[2]
    words = words_of(line)
    typed = words.pop() if words and not line[-1:].isspace() else ""
    found = _complete_word(command, words, typed, sources)
    return found if found is not None and found.texts else None


def _complete_word(
    command: click.Command, words: list[str], typed: str, sources: Sources
) -> Choices | None:
    flags = {
        flag: param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
    }
    used: set[str] = set()
    num_positional = 0
    awaiting: click.Parameter | None = None
    for word in words:
        if awaiting is not None:
            awaiting = None
            continue
        flag, equals, _ = word.partition("=")
        param = flags.get(flag)
        if param is None:
            num_positional += 1
            continue
        used.update(param.opts)
        awaiting = param if not param.is_flag and not equals else None
    if awaiting is not None:
        return _values(awaiting, typed, sources)
    flag, equals, value = typed.partition("=")
    if equals and flag in flags:
        return _values(flags[flag], value, sources)
    unused = sorted(
        (flag for flag in flags if flag not in used), key=lambda flag: (flag[:2] != "--", flag)
    )
    if typed.startswith("-"):
        return Choices(typed, tuple(flag for flag in unused if flag.startswith(typed)), "param")
    argument = _argument(command, num_positional)
    found = _values(argument, typed, sources) if argument is not None else None
    if found is None and not typed:
        return Choices("", tuple(unused), "param")
    return found


def _argument(command: click.Command, index: int) -> click.Argument | None:
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    for argument in arguments:
        if argument.nargs == -1 or index == 0:
            return argument
        index -= 1
    return None


def _values(param: click.Parameter, typed: str, sources: Sources) -> Choices | None:
    if isinstance(param.type, click.Choice):
        return _starting(typed, map(str, param.type.choices))
    means: Meaning | None = getattr(param.type, "means", None)
    match means:
        case "ranks":
            return _ranks(typed, sources.num_ranks)
        case "rank":
            return _starting(typed, map(str, range(sources.num_ranks)))
        case "coordinate":
            return _coordinate(typed, sources.dims)
        case "dims":
            return _starting(typed, (f"{name}=" for name in sources.dims))
        case "expression":
            return Choices(*_tuple(sources.on_ranks(typed, False)))
        case "names":
            return Choices(*_tuple(sources.on_ranks(typed, True)))
        case "names and file":
            files = _files(typed)
            if files.typed != typed:  # in a folder, or in quotes
                return files
            return Choices(typed, (*sources.on_ranks(typed, True)[1], *files.texts))
        case "notebook's names":
            return _starting(typed, sources.in_notebook())
        case "meshes":
            return _starting(typed, sources.meshes())
        case "numbers":
            return _starting(typed, sources.numbers())
        case "file":
            return _files(typed)
        case "words":
            return _starting(typed, getattr(param.type, "words", ()))
    return None


def _tuple(found: tuple[str, Iterable[str]]) -> tuple[str, tuple[str, ...]]:
    return found[0], tuple(found[1])


def _starting(typed: str, texts: Iterable[str], kind: str = "instance") -> Choices:
    return Choices(typed, tuple(text for text in texts if text.startswith(typed)), kind)


def _ranks(typed: str, num_ranks: int) -> Choices:
    """Another rank of a set; at its begin all of them, too."""
    *before, last = typed.split(",")
    low, dash, high = last.partition("-")
    if dash:
        least = int(low) + 1 if low.isdecimal() else num_ranks
        return _starting(high, map(str, range(least, num_ranks)))
    singles = [str(rank) for rank in range(min(num_ranks, _MAX_RANKS)) if str(rank) not in before]
    if before or num_ranks < 2:
        return _starting(last, singles)
    return _starting(last, ["all", f"0-{num_ranks - 1}", *singles])


def _coordinate(typed: str, dims: Mapping[str, int]) -> Choices:
    *before, last = typed.split(",")
    name, equals, index = last.partition("=")
    if equals:
        return _starting(index, map(str, range(dims.get(name, 0))))
    given = {part.partition("=")[0] for part in before}
    return _starting(last, (f"{dim}=" for dim in dims if dim not in given))


def _files(typed: str) -> Choices:
    """Files and folders that begin so; hidden ones where the dot is typed."""
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
