"""Reads the line of a magic: its words, its options by name; and formats a magic's help."""

from __future__ import annotations

import difflib
import re
from typing import Any

import click

from ..errors import MeshUsageError
from .options import COMMANDS

# A magic's options, as `parse` reads them: name -> value.
Given = dict[str, Any]


def describe(name: str, cell: bool) -> str:
    """Return a magic's help, as ``%magic?`` shows it."""
    command = COMMANDS[name]
    prefix = "%%" if cell else "%"
    with click.Context(command, info_name=f"{prefix}{name}", max_content_width=100) as context:
        return command.get_help(context)


# A word ends at white space that is not in quotes; a lone quote is a character like any other.
_WORD = re.compile(r"""(?:[^\s'"]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|['"])+""")


def words_of(line: str) -> list[str]:
    """Split a magic's line into words, with quotes and escapes left as they stand."""
    return _WORD.findall(line)


def split(line: str) -> list[str]:
    """Split a magic's line into words; quotes stay, as arguments may be Python expressions.

    The value of an option loses the quotes round it.
    """
    words = words_of(line)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("--") and equals:
            words[index] = f"{option}={unquote(value)}"
        elif index and words[index - 1].startswith("--"):
            words[index] = unquote(word)
    return words


def unquote(word: str) -> str:
    """Return a word without the quotes round it."""
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word


def wants_help(line: str) -> bool:
    """Return whether a magic's line is ``--help`` or ``-h``."""
    return line.split() in (["--help"], ["-h"])


def parse(name: str, line: str) -> dict[str, Any]:
    """Read the options and arguments in a magic's line.

    Args:
        name: the magic.
        line: what follows it. Quotes are kept: arguments may be Python expressions.

    Returns:
        The options by name.

    Raises:
        MeshUsageError: an option is unknown, or its value is of the wrong kind.
    """
    command = COMMANDS[name]
    words = split(line)
    try:
        with command.make_context(name, words) as context:
            return dict(context.params)
    except click.UsageError as e:
        if isinstance(e, click.NoSuchOption):  # click names several, by the alphabet
            known = [option for each in command.params for option in each.opts]
            near = difflib.get_close_matches(e.option_name, known, n=1)
            e = click.NoSuchOption(e.option_name, possibilities=near)
        mark = "%%" if name in ("dist", "dist_profile", "local") else "%"
        quotes = (
            "; put what follows --argv into quotes, like --argv '--lr 0.1'"
            if "--argv" in line
            else ""
        )
        raise MeshUsageError(
            f"{mark}{name}: {e.format_message()} ({mark}{name}? shows its options{quotes})"
        ) from None
