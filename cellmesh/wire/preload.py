"""The list of modules that the ranks of a project have imported, which its next zygote imports
once, before ranks are forked from it.

A list is a file beside the directory of meshes, one for each project, interpreter and torch. It
never decides about results: a module that is missing from it is imported by each rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from ..errors import HostError
from .own_file import from_json, open_own_directory, read_own_file, write_whole
from .ticket import runtime_root

# Modules of a list, those whose imports take longest; and the least time of an import in it.
MAX_MODULES = 300
LEAST_S = 0.001
# Duration, in seconds, of an import for which a start does not wait.
SLOW_S = 2.0


class LeftOut(msgspec.Struct, frozen=True):
    """The reason why a module is not preloaded, while its package's file has this time stamp."""

    reason: str
    stamp: int


class Preloads(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a list.

    Attributes:
        project: the project, for readers of the file.
        modules: modules that all ranks of a mesh have imported, in the order in which their imports
            ended, each with the duration, in seconds.
        left_out: modules that are not preloaded, nor what is in them.
    """

    project: str = ""
    modules: dict[str, float] = {}
    left_out: dict[str, LeftOut] = {}


def list_path(project: str) -> Path:
    """Return the path of a project's list for this interpreter and the torch that it would import.

    Args:
        project: directory of the project, or path of the script.
    """
    torch = PathFinder.find_spec("torch")
    origin = None if torch is None else torch.origin
    built_at = os.stat(origin).st_mtime_ns if origin else 0
    key = json.dumps([project, sys.prefix, sys.version, origin, built_at])
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
    root = runtime_root()  # under /tmp its name has the user's id, and so has that of the lists
    return root.with_name(f"{root.name}-preload") / f"{digest}.json"


def read_preloads(path: Path) -> Preloads:
    """Read a list; an empty one if the file is missing, damaged, or another user's."""
    with contextlib.suppress(HostError, ValueError):
        return from_json(read_own_file(path), Preloads)
    return Preloads()


def change_preloads(path: Path, change: Callable[[Preloads], Preloads]) -> None:
    """Change a list. Nothing changes where the directory cannot be written or is not this user's
    alone, or while another process changes a list: what is lost is noted when ranks import the
    modules the next time.
    """
    with contextlib.suppress(OSError, HostError), contextlib.ExitStack() as stack:
        directory = open_own_directory(path.parent)
        stack.callback(os.close, directory)
        # Without waiting, as the caller may be the thread that serves all meshes of a notebook.
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before = read_preloads(path)
        after = change(before)
        if after != before:
            write_whole(path, after)


def learn(preloads: Preloads, project: str, seen: Mapping[str, float]) -> Preloads:
    """Add modules that all ranks of a mesh have imported.

    Args:
        preloads: the list.
        project: the project, for readers of the file.
        seen: name of a module -> duration of its import, in seconds.
    """
    known = {**preloads.modules, **seen}
    slowest = set(sorted(known, key=lambda name: -known[name])[:MAX_MODULES])
    modules = {name: took_s for name, took_s in known.items() if name in slowest}
    return msgspec.structs.replace(preloads, project=project, modules=modules)


def leave_out(preloads: Preloads, name: str, reason: str) -> Preloads:
    """Note that a module must not be preloaded, unless its package is installed again."""
    left_out = preloads.left_out | {name: LeftOut(reason, stamp_of(name))}
    return msgspec.structs.replace(preloads, left_out=left_out)


def names_to_import(preloads: Preloads, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of some modules that a zygote is to import, in order."""
    left_out = still_left_out(preloads)
    return tuple(name for name in names if left_out.isdisjoint(with_packages(name)))


def quick_to_import(preloads: Preloads, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some modules for which the start of a mesh waits.

    A script imports again what it has imported before. Of a project, which has several scripts or
    cells, it waits for no package of which a module has taken ranks longer than `SLOW_S`, as a
    script may need none of it. (Most need the same parts of torch.)
    """
    slow = {name.partition(".")[0] for name, took_s in preloads.modules.items() if took_s > SLOW_S}
    slow = set() if os.path.isfile(preloads.project) else slow - {"torch"}
    return tuple(name for name in names if name.partition(".")[0] not in slow)


def still_left_out(preloads: Preloads) -> frozenset[str]:
    """Return the modules that are not preloaded, as their packages were not installed again."""
    return frozenset(
        name for name, left in preloads.left_out.items() if left.stamp == stamp_of(name)
    )


def with_packages(name: str) -> list[str]:
    """Return the names of the packages that a module is in, the outermost first, and its own."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def stamp_of(name: str) -> int:
    """Return the modification time of the file of a module's top package, in ns; 0 without one."""
    spec = PathFinder.find_spec(name.partition(".")[0])
    with contextlib.suppress(OSError):
        return os.stat(spec.origin).st_mtime_ns if spec is not None and spec.origin else 0
    return 0


def is_installed(file: str) -> bool:
    """Return whether a module's file is that of an installed package, not the user's own.

    An editable install is the user's own, also where a link in ``site-packages`` leads to it.
    """
    return not {"site-packages", "dist-packages"}.isdisjoint(os.path.realpath(file).split("/"))


def is_found_installed(name: str) -> bool:
    """Return whether a module would be imported from an installed package."""
    spec = PathFinder.find_spec(name.partition(".")[0])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    files = [place for place in places if place is not None]
    return bool(files) and all(map(is_installed, files))
