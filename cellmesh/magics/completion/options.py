"""Completes the end of a magic's line from the options' declarations."""

from __future__ import annotations

import re

import click
from click.shell_completion import CompletionItem, ShellComplete

from ..line import words_of
from ..options import COMMANDS
from .meanings import Choices, NameSources

_LINE = re.compile(r"^\s*(?:\w+\s*=\s*)?%{1,2}(\w+)\s(.*)$", re.DOTALL)


def complete_line(text: str, sources: NameSources) -> Choices | None:
    """Return the completions of the last word of a magic's line.

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
    shell = ShellComplete(command, {"obj": sources}, match[1], "")
    found = shell.get_completions([*words], typed)
    if typed.startswith("-") and "=" not in typed:
        return _flags(typed, found)
    if not (found or typed or _awaits_value(command, words)):
        return _flags("", shell.get_completions(words, "-"))
    if not found:
        return None
    replaced = found[0].typed  # of our own types, which click's do not say
    if replaced is None:
        replaced = typed.partition("=")[2] if typed.startswith("-") else typed
    kind = "instance" if found[0].type == "plain" else found[0].type
    return Choices(replaced, tuple(item.value for item in found), kind)


def _flags(typed: str, found: list[CompletionItem[str]]) -> Choices | None:
    texts = sorted((item.value for item in found), key=lambda flag: (flag[:2] != "--", flag))
    return Choices(typed, tuple(texts), "param") if texts else None


def _awaits_value(command: click.Command, words: list[str]) -> bool:
    """Return whether the last word is an option whose value follows."""
    return any(
        isinstance(param, click.Option) and not param.is_flag and words[-1:] == [flag]
        for param in command.params
        for flag in param.opts
    )
