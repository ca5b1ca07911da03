"""Sends the hosts of a mesh what has changed beside the notebook before a run."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import HostError
from ...wire.code_files import CodeFile, FilesAnswer, OfferFiles, SendFiles, digest_of
from ...wire.codec import Parcel
from ...wire.host import this_place
from ...wire.own_file import open_regular
from .scan import FileState, Found, Key, Scanner

# So much goes in one message, which other messages to the host wait behind.
_CHUNK_BYTES = 4 << 20
# Calls in a row cost a look at the files now and then, and not each, unless a module was loaded.
_LOOK_S = 0.25
_MAX_NAMED = 5
# A file that is written at this moment is read once more.
_MAX_TRIES = 5
_EXCLUDE = (
    "list what the ranks need not have in .gitignore, or start the mesh with `--sync off` and "
    "bring the files to the hosts yourself"
)

# Makes the messages to each host, given the request's number and the hosts there are.
Make = Callable[[int, Collection[int]], Mapping[int, Sequence[Parcel[Any]]]]


class Changed(Exception):
    """A file has changed between two looks at it, or is not as large as it says."""

    def __init__(self, key: Key, text: str) -> None:
        super().__init__(text)
        self.key = key


@dataclass(eq=False)
class CodeSync:
    """Keeps the user's files on the hosts as they are here; used on any thread.

    Args:
        roots: the directories that are kept the same.
        ask: sends messages to agents, and waits so many seconds for the answers of all of them, by
            host; None if the mesh has ended.
        name_host: names a host.
        num_loads: returns how many modules this process has loaded and reloaded.
        say: shows the user a sentence.
    """

    roots: tuple[str, ...]
    ask: Callable[[Make, float | None], Mapping[int, FilesAnswer] | None]
    name_host: Callable[[int], str]
    num_loads: Callable[[], int]
    say: Callable[[str], None]
    _files: Mapping[Key, FileState] | None = None  # that the hosts have
    _digests: dict[Key, tuple[FileState, bytes]] = field(default_factory=dict)
    _unreadable: tuple[str, ...] = ()  # of these, with the reason
    _said: tuple[str, ...] = ()
    _looked: tuple[float, int] = (-_LOOK_S, 0)  # when, and after how many loads

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._scanner = Scanner(self.roots)

    def forget(self) -> None:
        """Offer all files to all hosts the next time, as a host is new or was away."""
        self._files = None

    def bring(self, is_hurried: bool = False, timeout_s: float | None = None) -> None:
        """Make the hosts' files equal to those here, if these have changed. Blocks.

        Args:
            is_hurried: look at the files only if that was not done a moment ago.
            timeout_s: how long to wait for each answer; None as long as there is the host.

        Raises:
            HostError: a host cannot have the files, or has not answered; nothing must run on it
                then.
        """
        num_loads, now = self.num_loads(), time.monotonic()
        is_recent = num_loads == self._looked[1] and now < self._looked[0] + _LOOK_S
        if is_hurried and is_recent and self._files is not None:
            return
        with self._lock:
            changes: collections.Counter[Key] = collections.Counter()
            while True:
                self._looked = time.monotonic(), num_loads
                found = self._scanner.scan()
                if found.files == self._files:
                    self._tell(found, self._unreadable)
                    return
                offered, unreadable, again = self._describe_all(found.files, changes)
                if again:
                    continue
                self._tell(found, unreadable)
                try:
                    self._bring(offered, found.files, timeout_s)
                except Changed as change:
                    changes[change.key] += 1
                    continue
                self._files, self._unreadable = found.files, unreadable
                return

    def _describe_all(
        self, files: Mapping[Key, FileState], changes: collections.Counter[Key]
    ) -> tuple[tuple[CodeFile, ...], tuple[str, ...], bool]:
        """Read what has changed; `changes` counts how often a file did while it was read.

        Returns:
            The files; sentences on those that cannot be read, and are left out; whether to look
            again, as some have changed.
        """
        offered: list[CodeFile] = []
        unreadable: list[str] = []
        again = False
        for key, state in sorted(files.items()):
            if changes[key] >= _MAX_TRIES:
                unreadable.append(f"{self._path(key)}: it changes while it is read")
                continue
            try:
                offered.append(self._describe(key, state))
            except Changed as change:
                changes[key] += 1
                if changes[key] < _MAX_TRIES:
                    again = True
                else:
                    unreadable.append(f"{self._path(key)}: {change}")
            except OSError as error:
                unreadable.append(f"{self._path(key)}: {error.strerror}")
        return tuple(offered), tuple(unreadable), again

    def _bring(
        self,
        offered: tuple[CodeFile, ...],
        files: Mapping[Key, FileState],
        timeout_s: float | None,
    ) -> None:
        here = tuple(index for index, root in enumerate(self.roots) if os.path.isdir(root))
        boot = this_place().boot

        def offer(request: int, hosts: Collection[int]) -> Mapping[int, Sequence[Parcel[Any]]]:
            parcel = Parcel(OfferFiles(request, here, offered, boot))
            return {host: [parcel] for host in hosts}

        answers = self.ask(offer, timeout_s)
        missing = self._check(answers)
        if any(missing.values()):
            by_digest = {file.digest: (file.root, file.path) for file in offered}
            contents = {
                digest: self._read_again(digest, by_digest[digest], files[by_digest[digest]])
                for digest in set().union(*map(set, missing.values()))
            }
            answers = self.ask(
                lambda request, hosts: {
                    host: list(messages(request, missing[host], contents))
                    for host in hosts
                    if missing.get(host)
                },
                timeout_s,
            )
            if any(self._check(answers).values()):
                raise HostError("a host still lacks files that were sent to it")

    def _describe(self, key: Key, state: FileState) -> CodeFile:
        known = self._digests.get(key)
        if known is None or known[0] != state:
            known = self._digests[key] = state, digest_of(self._read(key, state))
        numbers = state.num_bytes, state.mtime_ns, state.ctime_ns, state.inode
        return CodeFile(*key, known[1], *numbers)

    def _path(self, key: Key) -> str:
        return f"{self.roots[key[0]]}/{key[1]}"

    def _read(self, key: Key, state: FileState) -> bytes:
        try:
            with open_regular(self._path(key)) as file:
                content = file.read(state.num_bytes + 1)
        except FileNotFoundError:
            raise Changed(key, "it is removed and made again all the time") from None
        if len(content) != state.num_bytes:
            raise Changed(key, f"it does not have the {state.num_bytes} bytes that it should have")
        return content

    def _read_again(self, digest: bytes, key: Key, state: FileState) -> bytes:
        try:
            content = self._read(key, state)
        except OSError:  # it could be read a moment ago
            content = b""
        if digest_of(content) != digest:
            self._digests.pop(key, None)
            raise Changed(key, "it changes while it is read")
        return content

    def _check(self, answers: Mapping[int, FilesAnswer] | None) -> dict[int, tuple[bytes, ...]]:
        """Return what each host lacks.

        Raises:
            HostError: a host has a problem.
        """
        by_host = answers or {}  # the mesh's end is said elsewhere
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
        return {index: answer.missing for index, answer in by_host.items()}

    def _tell(self, found: Found, unreadable: tuple[str, ...]) -> None:
        """Say what is left out, once."""
        left_out = (*found.left_out, *found.problems, *unreadable)
        if left_out and left_out != self._said:
            named = [*found.left_out, *cut((*found.problems, *unreadable))]
            self.say(f"not on the ranks' hosts: {'; '.join(named)}. {_EXCLUDE}")
        self._said = left_out


def cut(sentences: Sequence[str]) -> list[str]:
    """Return the first few sentences, and how many more there are."""
    more = len(sentences) - _MAX_NAMED
    return [*sentences[:_MAX_NAMED], *([f"{more} more such entries"] if more > 0 else [])]


def messages(
    request: int, missing: Iterable[bytes], contents: Mapping[bytes, bytes]
) -> Iterator[Parcel[SendFiles]]:
    """Make the messages that give a host what it lacks, in pieces of a bounded size.

    Args:
        request: their number.
        missing: the digests of what it lacks.
        contents: by digest.
    """
    part: list[bytes] = []
    num_bytes = 0
    for digest in missing:
        part.append(digest)
        num_bytes += len(contents[digest])
        if num_bytes >= _CHUNK_BYTES:
            yield _message(request, part, contents)
            part, num_bytes = [], 0
    if part:
        yield _message(request, part, contents)


def _message(
    request: int, digests: Sequence[bytes], contents: Mapping[bytes, bytes]
) -> Parcel[SendFiles]:
    buffers = tuple(contents[digest] for digest in digests)
    return Parcel(SendFiles(request, tuple(digests), len(buffers)), buffers)
