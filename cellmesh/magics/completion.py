"""Handles Tab, Shift+Tab and ``obj?`` in a notebook: asks a rank about names in cells for ranks,
and completes the options of cellmesh's magics.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem, ShellComplete
from IPython.core import page
from IPython.core.completer import Completion, CompletionContext, SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor

from ..controller.actors import Actor
from ..controller.inspect import look_at_one
from ..controller.mesh import Mesh
from ..controller.ranks import Ranks
from ..errors import CellmeshError
from ..wire.inspect import Complete, Completions, Explain, Query
from .auto import CellForRanks
from .options import COMMANDS, Choices, CompleteWord, Meaning, words_of

# Help by name, as in ``model?``, is the output of a cell, and may take longer.
_HELP_S = 5.0


def show_help(shell: InteractiveShell, ranks: Ranks, name: str, detail: int) -> None:
    """Show help for ``name?`` (`detail` 0) or ``name??`` (1) of the ranks, else of the notebook."""
    text = look_at_one(ranks.rank_set, Explain(name, detail), _HELP_S)
    if text:
        page.page({"text/plain": text})
    else:
        shell.run_line_magic("pinfo2" if detail else "pinfo", name)


_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\n]*'|\"[^\"\n]*\")\])*")


def name_at(source: str, cursor: int) -> str:
    """Return the name to explain at a cursor: the name under it with its indices, else the function
    whose call contains it.
    """
    for match in _PATH.finditer(source):
        if match.start() <= cursor <= match.end():
            end = re.compile(r"\w*").match(source, cursor)
            assert end is not None
            upto = source[match.start() : end.end()]
            whole = _PATH.match(upto)
            if whole is not None:
                return whole.group()
    return str(token_at_cursor(source, cursor))


_WAIT_S = 0.15
# The notebook's matchers that complete names of its own process.
_OF_NAMES = ("jedi", "python", "dict_key")


class CellCompletion:
    """Completes code and explains the name at the cursor in one shell.

    Args:
        shell: shell of the notebook.
        mesh: returns the mesh that a magic's options name, else the one in use, if there is one.
        read: returns the part of a cell that runs on ranks, and these ranks.
        meshes: returns the names of the meshes that may stand at the end of a magic's line.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        mesh: Callable[[dict[str, Any]], Mesh | None],
        read: Callable[[str], tuple[CellForRanks, Ranks] | None],
        meshes: Callable[[str], Sequence[str]],
    ) -> None:
        self._shell = shell
        self._mesh = mesh
        self._read, self._meshes = read, meshes
        self._kernel: Any = getattr(shell, "kernel", None)
        self._own: Any = None
        self._own_help: Any = None
        self._matcher: Any = None

    def install(self) -> None:
        """Replace the completer and the inspector of the shell by this object's."""
        completer = self._shell.Completer
        self._own = completer.completions
        completer.completions = self._completions  # type: ignore[method-assign]

        @context_matcher(identifier="cellmesh.options", priority=100)  # type: ignore[untyped-decorator]
        def match_options(context: CompletionContext) -> dict[str, Any]:
            methods = complete_handle(context.text_until_cursor, self._shell.user_ns)
            return _as_matches(methods) if methods else self._match_options(context)

        self._matcher = match_options
        completer.custom_matchers.append(match_options)
        if self._kernel is not None:
            self._own_help = self._kernel.do_inspect
            self._kernel.do_inspect = self._do_inspect

    def remove(self) -> None:
        """Restore the completer and the inspector that `install` replaced."""
        completer = self._shell.Completer
        _give_back(completer, "completions", self._completions)
        _give_back(self._kernel, "do_inspect", self._do_inspect)
        with contextlib.suppress(ValueError):
            completer.custom_matchers.remove(self._matcher)

    def _completions(self, text: str, offset: int) -> Iterator[Completion]:
        found = self._complete(text, offset)
        if found is None:
            yield from self._own(text, offset)
            return
        for name, kind in zip(found.texts, found.kinds, strict=True):
            yield Completion(found.begin, offset, name, type=kind, signature="")
        if found.is_whole:
            return
        with self._without_names():
            others = list(self._own(text, offset))
        yield from (each for each in others if each.text not in found.texts)

    def _do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        """Explain a name on ranks; for other names, call the kernel's method."""
        text, _ = self._ask(
            code, cursor_pos, lambda *at: Explain(name_at(*at), detail_level), _WAIT_S
        )
        if text:
            return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}
        return self._own_help(code, cursor_pos, detail_level, *args, **kwargs)

    def _complete(self, text: str, offset: int) -> Completions | None:
        """Return a rank's completions at an offset in the text; None if there are none."""
        found: Completions | None
        found, begin = self._ask(text, offset, Complete, _WAIT_S)
        if found is None or not found.texts:
            return None
        return msgspec.structs.replace(found, begin=begin + found.begin)

    def _ask(
        self, text: str, offset: int, query: Callable[[str, int], Query], timeout_s: float
    ) -> tuple[Any, int]:
        """Ask a rank about an offset in a cell; return the answer, and the offset of the ranks'
        source in the text.
        """
        with contextlib.suppress(
            CellmeshError, UnicodeError
        ):  # the mesh has ended; half of a character
            read = self._read(text)
            if read is not None and offset >= read[0].begin:
                cell, ranks = read
                subject = query(cell.source, offset - cell.begin)
                return look_at_one(ranks.rank_set, subject, timeout_s), cell.begin
        return None, 0

    @contextlib.contextmanager
    def _without_names(self) -> Iterator[None]:
        """Enter a context in which the shell does not complete the notebook's own names."""
        completer = self._shell.Completer
        names = [
            getattr(matcher, "matcher_identifier", matcher.__qualname__)
            for matcher in completer.matchers
        ]
        before = completer.disable_matchers
        ours = [name for name in names if any(part in name for part in _OF_NAMES)]
        completer.disable_matchers = [*before, *ours]
        try:
            yield
        finally:
            completer.disable_matchers = before

    # ---- magics' options

    def _match_options(self, context: CompletionContext) -> dict[str, Any]:
        line = context.text_until_cursor
        found = complete_line(line, lambda *word: self._complete_word(line, *word))
        return {"completions": [], "suppress": False} if found is None else _as_matches(found)

    def _complete_word(self, line: str, typed: str, meaning: Meaning) -> Choices:
        if meaning == "mesh":
            names = self._meshes(line)
            return Choices(typed, tuple(name for name in names if name.startswith(typed)))
        if meaning == "notebook's name":
            hidden = self._shell.user_ns_hidden
            names = sorted(name for name in self._shell.user_ns if name not in hidden)
            shown = (name for name in names if typed or not name.startswith("_"))
            return Choices(typed, tuple(name for name in shown if name.startswith(typed)))
        on = _ON.search(line)
        mesh = self._mesh({"on": on[1]} if on is not None else {})
        found = None
        if mesh is not None and (meaning == "expression" or typed.isidentifier() or not typed):
            with contextlib.suppress(CellmeshError, UnicodeError):
                subject = Complete(typed, len(typed), users_only=True)
                found = look_at_one(mesh.rank_set, subject, _WAIT_S)
        if found is None:
            return Choices(typed, ())
        return Choices(typed[found.begin :], found.texts)


def _as_matches(found: Choices) -> dict[str, Any]:
    return {
        "completions": [SimpleCompletion(text, type=found.kind) for text in found.texts],
        "matched_fragment": found.typed,
        "suppress": True,
        "ordered": True,
    }


_INDEXED = re.compile(r"([^\W\d]\w*)\[[^.\n]*\]\.(\w*)$")


def complete_handle(text: str, names: Mapping[str, Any]) -> Choices | None:
    """Return the methods with which a text may end, of a part of an actor, as in ``trainer[0].st``;
    None if its end is no part of an actor. IPython and jedi do not evaluate ``trainer[0]``.

    Args:
        text: the text up to the cursor.
        names: the notebook's variables.
    """
    match = _INDEXED.search(text)
    handle = names.get(match[1]) if match is not None else None
    if match is None or not isinstance(handle, Actor):
        return None
    found = tuple(name for name in dir(handle) if name.startswith(match[2]))
    return Choices(match[2], found, "function")


def _give_back(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Remove a replacement from an object, so that its class's own method is back, unless other
    code has replaced the method again.
    """
    if owner is not None and vars(owner).get(name) == ours:
        delattr(owner, name)


# ---------------------------------------------------------------- options of the magics

_ON = re.compile(r"\s--on[ =](\S+)\s")
_LINE = re.compile(r"^\s*(?:\w+\s*=\s*)?%{1,2}(\w+)\s(.*)$", re.DOTALL)


def complete_line(text: str, complete: CompleteWord) -> Choices | None:
    """Return the completions of the last word of a magic's line.

    Args:
        text: the line up to the cursor, with the magic and its ``%``.
        complete: completes names of values.

    Returns:
        The choices; None if it is no line of our magics, or the last word has no known choices.
    """
    match = _LINE.match(text)
    if match is None or match[1] not in COMMANDS:
        return None
    command, line = COMMANDS[match[1]], match[2]
    words = words_of(line)
    typed = words.pop() if words and not line[-1:].isspace() else ""
    shell = ShellComplete(command, {"obj": complete}, match[1], "")
    found = shell.get_completions([*words], typed)
    if typed.startswith("-") and "=" not in typed:
        return _flags(typed, found)
    if not (found or typed or _awaits_value(command, words)):
        return _flags("", shell.get_completions(words, "-"))
    if not found:
        return None
    replaced = found[0].typed  # an attribute of our own types only
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
