"""The list of modules that the ranks of a project have imported, which its next zygote imports
once, before ranks are forked from it.

A list is a file beside the directory of meshes, one for each project, interpreter and torch. It
never decides about results: a module that is missing from it is imported by each rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from ..errors import HostError
from .own_file import from_json, read_own_file, write_whole
from .ticket import runtime_root

# Modules of a list, those whose imports take longest; and the least time of an import in it.
MAX_MODULES = 300
LEAST_S = 0.001
# A rank does not import what its zygote has imported, so nothing shows that a project has ceased to
# use a module: it is learned again after this time.
_KEPT_S = 30 * 86400.0


class LearnedModule(msgspec.Struct, frozen=True):
    """A module that all ranks of a mesh have imported; times in seconds, and since the epoch."""

    name: str
    took_s: float
    learned_at: float


class LeftOut(msgspec.Struct, frozen=True):
    """The reason why a module is not preloaded, while its package's file has this time stamp."""

    reason: str
    stamp: int


class Preloads(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a list: modules in the order of their first imports, and those left out."""

    project: str = ""
    modules: tuple[LearnedModule, ...] = ()
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
    return runtime_root().with_name("cellmesh-preload") / f"{digest}.json"


def read_preloads(path: Path) -> Preloads:
    """Read a list; an empty one if the file is missing, damaged, or another user's."""
    with contextlib.suppress(HostError, ValueError):
        return from_json(read_own_file(path), Preloads)
    return Preloads()


def change_preloads(path: Path, change: Callable[[Preloads], Preloads]) -> None:
    """Change a list; several processes may do so at once. Nothing changes where the directory
    cannot be written.
    """
    with contextlib.suppress(OSError, HostError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = read_preloads(path)
            after = change(before)
            if after != before:
                write_whole(path, after)


def learn(preloads: Preloads, project: str, seen: Mapping[str, float], now: float) -> Preloads:
    """Add modules that all ranks of a mesh have imported.

    Args:
        preloads: the list.
        project: the project, for readers of the file.
        seen: name of a module -> duration of its import, in seconds.
        now: seconds since the epoch.
    """
    kept = {each.name: each for each in preloads.modules if now < each.learned_at + _KEPT_S}
    kept |= {name: LearnedModule(name, took_s, now) for name, took_s in seen.items()}
    slowest = sorted(kept.values(), key=lambda each: -each.took_s)[:MAX_MODULES]
    names = {each.name for each in slowest}
    return msgspec.structs.replace(
        preloads,
        project=project,
        modules=tuple(each for each in kept.values() if each.name in names),
    )


def leave_out(preloads: Preloads, name: str, reason: str) -> Preloads:
    """Note that a module must not be preloaded, unless its package is installed again."""
    left_out = preloads.left_out | {name: LeftOut(reason, stamp_of(name))}
    return msgspec.structs.replace(preloads, left_out=left_out)


def names_to_import(preloads: Preloads, now: float) -> tuple[str, ...]:
    """Return the names of the modules to preload, in order.

    Args:
        preloads: the list.
        now: seconds since the epoch.
    """
    return tuple(
        each.name
        for each in preloads.modules
        if now < each.learned_at + _KEPT_S and not _is_left_out(preloads, each.name)
    )


def _is_left_out(preloads: Preloads, name: str) -> bool:
    left_out = preloads.left_out.get(name)
    return left_out is not None and left_out.stamp == stamp_of(name)


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
