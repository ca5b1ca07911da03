"""Which files git ignores, by the ``.gitignore`` files above and among them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_NAME = ".gitignore"


@dataclass(frozen=True)
class Ignore:
    """The rules for the entries of one directory: those of its own ``.gitignore``, then those of
    the directories above it.

    Args:
        rules: of the outermost directory first: the directory, and its rules.
    """

    rules: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    def hides(self, path: str, is_directory: bool) -> bool:
        """Whether git would ignore an entry of the directory.

        Args:
            path: absolute.
            is_directory: whether it is one.
        """
        for directory, spec in reversed(self.rules):
            relative = path[len(directory) :].lstrip("/") + "/" * is_directory
            verdict = spec.check_file(relative).include
            if verdict is not None:
                return verdict
        return False

    def below(self, directory: str) -> Ignore:
        """Return the rules for the entries of a directory in this one."""
        try:
            with open(os.path.join(directory, _NAME), encoding="utf-8", errors="replace") as file:
                spec = _compile(file.read())
        except OSError:  # there is none, mostly
            return self
        return Ignore((*self.rules, (directory, spec)))


@functools.lru_cache(maxsize=256)
def _compile(text: str) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # only where there is such a file

    return GitIgnoreSpec.from_lines(text.splitlines())


def rules_above(directory: str) -> Ignore:
    """Return the rules that hold for a directory in a working tree of git; none outside of one."""
    path = Path(directory)
    for top in (path, *path.parents):
        if (top / ".git").exists():
            break
    else:
        return Ignore()
    ignore = Ignore()
    for parent in reversed(path.parents):
        if parent == top or top in parent.parents:
            ignore = ignore.below(str(parent))
    return ignore
