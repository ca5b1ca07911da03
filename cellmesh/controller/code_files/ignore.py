"""Which files git ignores, by the ``.gitignore`` files above and among them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...wire.own_file import read_regular

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_NAME = ".gitignore"
# The largest that people write have a hundredth of it.
_MAX_BYTES = 1 << 20
_MAX_NAMED = 3


@dataclass(frozen=True)
class Ignore:
    """The rules for the entries of one directory: those of its own ``.gitignore``, then those of
    the directories above it.

    Args:
        rules: of the outermost directory first: the directory, and its rules.
        problems: sentences on files of rules, and lines of them, that cannot be read.
    """

    rules: tuple[tuple[str, GitIgnoreSpec], ...] = ()
    problems: tuple[str, ...] = ()

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
        path = os.path.join(directory, _NAME)
        try:
            text = read_regular(path, _MAX_BYTES).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return self
        except OSError as error:
            return replace(
                self, problems=(*self.problems, f"{path} hides nothing: {error.strerror}")
            )
        spec, wrong = _compile(text)
        problems = [f"line {number} of {path} hides nothing: {why}" for number, why in wrong]
        return Ignore((*self.rules, (directory, spec)), (*self.problems, *problems))


@functools.lru_cache(maxsize=256)
def _compile(text: str) -> tuple[GitIgnoreSpec, tuple[tuple[int, str], ...]]:
    """Return the rules of a file, without the lines that are none; and these, with their numbers
    and the reason.
    """
    from pathspec import GitIgnoreSpec  # only where there is such a file

    lines = text.splitlines()
    try:
        return GitIgnoreSpec.from_lines(lines), ()
    except Exception:  # of one line, or more
        pass
    good, wrong = [], []
    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except Exception as error:
            wrong.append((number, str(error)))
        else:
            good.append(line)
    return GitIgnoreSpec.from_lines(good), tuple(wrong[:_MAX_NAMED])


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
