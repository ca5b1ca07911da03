"""Finds the user's files that an import can reach, by file names and times only.

These are the modules below the user's own directories of `sys.path`, and all files in packages,
whose code may read them as data.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import stat
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from ...wire.own_file import read_regular

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_BYTES = 100_000_000
MAX_FILE_BYTES = 20_000_000
MAX_FILES = 10_000
MAX_SCAN_S = 5.0
_INSTALLED = ("site-packages", "dist-packages")
_SKIPPED = ("__pycache__", "node_modules", *_INSTALLED)
_COMPILED = (".pyc", ".pyo")
# A directory's time may not change if an entry is added right after the directory was listed.
_SETTLED_NS = 2_000_000_000
# This package is installed on the hosts, in the same version.
_OWN_PACKAGE = str(Path(__file__).parents[2])

Key = tuple[int, str]  # a root's number, and a path relative to the root


@dataclass(frozen=True)
class FileState:
    """The state of a file as its directory lists it, without its content."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Found:
    """The user's files that a scan has found, and sentences on those that it has left out.

    Attributes:
        files: the files, by root and path.
        left_out: a sentence on the directories that a bounded scan has not reached; "" if it has
            reached all.
        problems: sentences on entries that are too large or cannot be read, and are left out too.
    """

    files: Mapping[Key, FileState]
    left_out: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Listing:
    mtime_ns: int
    listed_ns: int
    ignore: Ignore
    is_package: bool
    files: tuple[str, ...]
    directories: tuple[str, ...]
    problems: tuple[str, ...] = ()


@dataclass(eq=False)
class Scanner:
    """Scans the user's directories repeatedly, and lists only directories that have changed.

    Args:
        roots: the directories.
        max_files, max_bytes, max_scan_s: a scan ends after so many files, bytes or seconds.
        max_file_bytes: larger files are left out.
    """

    roots: tuple[str, ...]
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES
    max_file_bytes: int = MAX_FILE_BYTES
    max_scan_s: float = MAX_SCAN_S
    _listings: dict[str, _Listing] = field(default_factory=dict)
    _last: dict[Key, FileState] = field(default_factory=dict)

    def scan(self) -> Found:
        """Scan the user's directories, breadth first, for files that an import can reach."""
        files: dict[Key, FileState] = {}
        unseen: list[str] = []
        problems: dict[str, None] = {}
        waiting: collections.deque[tuple[int, str, str, Ignore, bool]] = collections.deque()
        for index, root in enumerate(self.roots):
            waiting.append((index, "", root, rules_above(root), False))
        seen: set[tuple[int, int, int]] = set()  # links may lead in circles
        num_bytes = 0
        deadline = time.monotonic() + self.max_scan_s
        while waiting:
            index, prefix, path, ignore, in_package = waiting.popleft()
            is_large = len(files) >= self.max_files or num_bytes >= self.max_bytes
            if is_large or time.monotonic() > deadline:
                unseen.append(path)
                # Files that this scan does not reach count as unchanged, not as removed.
                files |= {
                    key: state
                    for key, state in self._last.items()
                    if key[0] == index and key[1].startswith(prefix)
                }
                continue
            try:
                status = os.stat(path)
                if (index, status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((index, status.st_dev, status.st_ino))
                listing = self._list(path, status.st_mtime_ns, ignore, in_package)
            except OSError as error:
                problems |= _describe(path, error)
                continue
            problems |= dict.fromkeys(listing.problems)
            for name in listing.files:
                try:
                    state = _state(f"{path}/{name}")
                except OSError as error:
                    problems |= _describe(f"{path}/{name}", error)
                    continue
                if state is None:
                    continue
                if state.num_bytes > self.max_file_bytes:
                    limit = f"more than {self.max_file_bytes / 1e6:.0f} MB"
                    problems[f"{path}/{name}: it has {limit}"] = None
                    continue
                files[index, prefix + name] = state
                num_bytes += state.num_bytes
            for name in listing.directories:
                inner = (index, f"{prefix}{name}/", f"{path}/{name}")
                waiting.append((*inner, listing.ignore, listing.is_package))
        self._last = files
        left_out = ""
        if unseen:
            left_out = (
                f"{unseen[0]}{f' and {len(unseen) - 1} other directories' * (len(unseen) > 1)}: a "
                f"scan ends after {self.max_files} files, {self.max_bytes / 1e6:.0f} MB or "
                f"{self.max_scan_s:.0f} s"
            )
        return Found(files, left_out, tuple(problems))

    def _list(self, path: str, mtime_ns: int, above: Ignore, in_package: bool) -> _Listing:
        known = self._listings.get(path)
        ignore = above.below(path)
        if (
            known is not None
            and known.mtime_ns == mtime_ns < known.listed_ns - _SETTLED_NS
            and known.ignore == ignore
        ):
            return known
        listed_ns = time.time_ns()
        files: list[str] = []
        directories: list[str] = []
        problems: dict[str, None] = {}
        with os.scandir(path) as entries:
            every = sorted(entries, key=lambda entry: entry.name)
        names = {entry.name for entry in every}
        is_package = in_package or "__init__.py" in names
        is_environment = "pyvenv.cfg" in names
        for entry in () if is_environment else every:
            name = entry.name
            try:
                is_directory = entry.is_dir()
            except OSError as error:  # a circular link, or one to a path without permission
                if any(_is_reachable(name, either, is_package) for either in (True, False)):
                    problems |= _describe(entry.path, error)
                continue
            if not _is_reachable(name, is_directory, is_package) or entry.path == _OWN_PACKAGE:
                continue
            if not ignore.hides(entry.path, is_directory):
                (directories if is_directory else files).append(name)
        entered = tuple(files), tuple(directories), tuple(problems)
        listing = _Listing(mtime_ns, listed_ns, ignore, is_package, *entered)
        if not problems:  # these may end without a change of the directory's time
            self._listings[path] = listing
        return listing


def _describe(path: str, error: OSError) -> dict[str, None]:
    """Return the text for users on a file or directory that cannot be read; an empty dict if it was
    removed.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return {}
    return {f"{path}: {error.strerror}": None}


def _is_reachable(name: str, is_directory: bool, is_package: bool) -> bool:
    """Return whether an import, or code of a package, may read an entry of a directory."""
    if name.startswith(".") or name in _SKIPPED:
        return False
    if is_package:
        return not name.endswith(_COMPILED)
    return name.isidentifier() if is_directory else name.endswith((".py", *EXTENSION_SUFFIXES))


def _state(path: str) -> FileState | None:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        return None
    return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def user_roots(sys_path: Iterable[str]) -> tuple[str, ...]:
    """Return the user's own directories of a `sys.path`, without those of Python and of installed
    packages.

    Args:
        sys_path: absolute paths.
    """
    python = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    roots = []
    for entry in sys_path:
        real = os.path.realpath(entry)
        is_pythons = any(real == each or real.startswith(f"{each}/") for each in python)
        is_installed = any(part in _INSTALLED for part in Path(real).parts)
        if real != "/" and os.path.isdir(real) and not is_pythons and not is_installed:
            roots.append(entry)
    return tuple(dict.fromkeys(roots))


_NAME = ".gitignore"
# A hundred times the size of the largest files that people write.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Ignore:
    """The ``.gitignore`` rules for the entries of a directory, from its own file and those of the
    directories above it.

    Args:
        rules: pairs of a directory and the rules of its file, the outermost directory first.
    """

    rules: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    def hides(self, path: str, is_directory: bool) -> bool:
        """Return whether git would ignore an entry of the directory.

        Args:
            path: absolute path of the entry.
            is_directory: whether the entry is a directory.
        """
        for directory, spec in reversed(self.rules):
            relative = path[len(directory) :].lstrip("/") + "/" * is_directory
            verdict = spec.check_file(relative).include
            if verdict is not None:
                return verdict
        return False

    def below(self, directory: str) -> Ignore:
        """Return the rules for the entries of a subdirectory, with those of its own ``.gitignore``
        if that can be read.
        """
        path = os.path.join(directory, _NAME)
        try:
            text = read_regular(path, _MAX_BYTES).decode(errors="replace")
        except OSError:
            return self
        return Ignore((*self.rules, (directory, _compile(text))))


@functools.lru_cache(maxsize=256)
def _compile(text: str) -> GitIgnoreSpec:
    """Parse the rules in the text of a ``.gitignore``; lines that are not valid patterns are
    skipped, as by git.
    """
    from pathspec import GitIgnoreSpec  # only if there is a .gitignore

    good = []
    for line in text.splitlines():
        with contextlib.suppress(Exception):
            GitIgnoreSpec.from_lines([line])
            good.append(line)
    return GitIgnoreSpec.from_lines(good)


def rules_above(directory: str) -> Ignore:
    """Return the rules that a directory inherits from its parents in a git working tree; outside
    of one, no rules.
    """
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
