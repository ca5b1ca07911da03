"""Sends the user's changed files to the hosts of a mesh before a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import HostError
from ...wire.codec import Parcel
from ...wire.hosts import CodeFile, FilesAnswer, PlaceFiles, digest_of, name_of
from ...wire.own_file import open_regular
from .scan import FileState, Found, Key, Scanner

# How long each answer of a new host may take.
FILES_S = 120.0
# Bytes per message; bounded, as other messages to the host wait behind it.
_CHUNK_BYTES = 4 << 20
# Minimum time between scans for a series of calls, unless a module was loaded.
_LOOK_S = 0.25
_MAX_NAMED = 5
# How often to read files again that change while they are read.
_MAX_TRIES = 5
_EXCLUDE = (
    "list what the ranks need not have in .gitignore, or start the mesh with `--sync off` and "
    "bring the files to the hosts yourself"
)

# Host -> its answer; None if the mesh has ended.
Answers = Mapping[int, FilesAnswer] | None
# Makes the messages to each host, given the number of the request and the hosts of the mesh.
Make = Callable[[int, Collection[int]], Mapping[int, Sequence[Parcel[Any]]]]


@dataclass(frozen=True, eq=False)
class _Copy:
    """A user's file as it was last read; `problem` is the reason for which it could not be read."""

    state: FileState
    content: bytes = b""
    problem: str = ""
    digest: bytes = b""


@dataclass(eq=False)
class CodeSync:
    """Keeps the user's files on the hosts equal to those of the notebook; usable on any thread.

    Args:
        roots: directories to copy.
        ask: sends messages to agents, waits for the answers of all of them up to a number of
            seconds, and returns them by host; None if the mesh has ended.
        name_host: returns the name of a host.
        num_loads: returns the number of modules that the notebook has loaded.
        say: shows a sentence to the user.
    """

    roots: tuple[str, ...]
    ask: Callable[[Make, float | None], Answers]
    name_host: Callable[[int], str]
    num_loads: Callable[[], int]
    say: Callable[[str], None]
    _copies: dict[Key, _Copy] = field(default_factory=dict)
    _placed: Mapping[Key, _Copy] = field(default_factory=dict)  # the files that the hosts have
    _name: str = ""  # of this set of files
    _is_sure: bool = False  # all hosts have them
    _said: tuple[str, ...] = ()
    _looked: tuple[float, int] = (-_LOOK_S, 0)  # last scan: time, and number of loaded modules

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._scanner = Scanner(self.roots)

    def forget(self) -> None:
        """Forget what hosts have, as a host is new or was disconnected: `bring` checks the files of
        all hosts.
        """
        self._is_sure = False

    def bring(self, is_hurried: bool = False, timeout_s: float | None = None) -> None:
        """Send the user's files to the hosts if the files have changed. Blocks.

        Args:
            is_hurried: whether to skip the scan if the last one was a moment ago.
            timeout_s: how long to wait for each answer, in seconds; None for as long as the host
                is in the mesh.

        Raises:
            HostError: a host cannot store the files, or has not answered; nothing must run on it.
        """
        num_loads, now = self.num_loads(), time.monotonic()
        is_recent = num_loads == self._looked[1] and now < self._looked[0] + _LOOK_S
        if is_hurried and is_recent and self._is_sure:
            return
        with self._lock:
            self._looked = now, num_loads
            found = self._read_changed()
            self._tell(found)
            files = {key: copy for key, copy in self._copies.items() if not copy.problem}
            if not self._is_sure or files != self._placed:  # `_Copy` is compared by identity
                self._place(files, timeout_s)

    def _read_changed(self) -> Found:
        """Read the changed files, until a scan shows no further change."""
        for _ in range(_MAX_TRIES):
            found = self._scanner.scan()
            changed = {
                key: state
                for key, state in found.files.items()
                if key not in self._copies or self._copies[key].state != state
            }
            self._copies = {key: self._copies[key] for key in found.files.keys() - changed.keys()}
            self._copies |= {key: self._read(key, state) for key, state in changed.items()}
            if not changed:
                break
        return found

    def _read(self, key: Key, state: FileState) -> _Copy:
        try:
            with open_regular(self._path(key)) as file:
                content = file.read(state.num_bytes + 1)
        except OSError as error:
            return _Copy(state, problem=error.strerror or str(error))
        if len(content) != state.num_bytes:
            problem = f"it does not have the {state.num_bytes} bytes that it should have"
            return _Copy(state, problem=problem)
        return _Copy(state, content, digest=digest_of(content))

    def _place(self, files: Mapping[Key, _Copy], timeout_s: float | None) -> None:
        """Send the changed files to all hosts, and all files to each host that lacks the unchanged
        ones.
        """
        described = [
            (_wire_path(key), copy.state.mtime_ns, copy.digest) for key, copy in files.items()
        ]
        name = name_of(described)
        changed: Mapping[Key, _Copy] = {}
        removed: tuple[str, ...] = ()
        if self._name:  # else ask first: the hosts may have the files from an earlier controller
            changed = {key: copy for key, copy in files.items() if self._placed.get(key) != copy}
            removed = tuple(_wire_path(key) for key in self._placed.keys() - files.keys())
        self._is_sure = False
        parts = list(_archive(changed))
        whole: list[bytes] = []

        def make(request: int, hosts: Collection[int]) -> Mapping[int, Sequence[Parcel[Any]]]:
            parcels = list(_messages(request, name, self._name or name, removed, parts))
            return dict.fromkeys(hosts, parcels)

        def make_whole(request: int, hosts: Collection[int]) -> Mapping[int, Sequence[Parcel[Any]]]:
            parcels = list(_messages(request, name, "", (), whole))
            return {host: parcels for host in hosts if host in lacking}

        lacking = self._find_lacking(self.ask(make, timeout_s), name)
        if lacking:
            whole += _archive(files)
            if self._find_lacking(self.ask(make_whole, timeout_s), name):
                raise HostError("a host still lacks files that were sent to it")
        self._placed, self._name, self._is_sure = files, name, True

    def _find_lacking(self, answers: Answers, name: str) -> set[int]:
        """Return the hosts whose answers show that they do not have the set of files with this
        name.

        Raises:
            HostError: a host reports a problem.
        """
        by_host = answers or {}  # the mesh's end is reported elsewhere
        problems = [
            f"{self.name_host(index)}: {answer.problem}"
            for index, answer in sorted(by_host.items())
            if answer.problem
        ]
        if problems:
            raise HostError(
                f"{'; '.join(problems)}. So the host cannot have the files beside the notebook, "
                f"and nothing was run. Try again once that is mended; or {_EXCLUDE}"
            )
        return {index for index, answer in by_host.items() if answer.name != name}

    def _path(self, key: Key) -> str:
        return f"{self.roots[key[0]]}/{key[1]}"

    def _tell(self, found: Found) -> None:
        """Show the user which files are not copied to the hosts, if that has changed since the last
        time.
        """
        unreadable = [
            f"{self._path(key)}: {copy.problem}"
            for key, copy in sorted(self._copies.items())
            if copy.problem
        ]
        left_out = (*filter(None, (found.left_out,)), *found.problems, *unreadable)
        if left_out and left_out != self._said:
            named = "; ".join(left_out[:_MAX_NAMED]) + "; ..." * (len(left_out) > _MAX_NAMED)
            self.say(f"not on the ranks' hosts: {named}. {_EXCLUDE}")
        self._said = left_out


def _wire_path(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _archive(files: Mapping[Key, _Copy]) -> Iterator[bytes]:
    """Yield an archive of files in parts of a bounded size; at least one part."""
    archive = msgspec.msgpack.encode(
        [
            CodeFile(_wire_path(key), copy.state.mtime_ns, copy.content)
            for key, copy in files.items()
        ]
    )
    for start in range(0, len(archive), _CHUNK_BYTES):
        yield archive[start : start + _CHUNK_BYTES]


def _messages(
    request: int, name: str, base: str, removed: tuple[str, ...], parts: Sequence[bytes]
) -> Iterator[Parcel[PlaceFiles]]:
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        yield Parcel(PlaceFiles(request, name, base, removed, is_last), (part,))
