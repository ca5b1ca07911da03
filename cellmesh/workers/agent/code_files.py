"""Keeps the user's modules on this host as they are beside the notebook.

The directory ``code`` of the mesh's directory has one directory for each of the notebook's
(`Ticket.roots`), from which ranks import. Where this host shares a directory with the notebook's
host, ranks import from there, and nothing is sent or copied.

Files arrive and are hashed on a thread of its own, as the agent must answer at once when a process
ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...stdlib import time
from ...wire.code_files import CodeFile, FilesAnswer, OfferFiles, SendFiles, digest_of, is_inside
from ...wire.codec import Frame
from ...wire.filesystems import SHARED_FILESYSTEMS, filesystem_of
from ...wire.host import this_place
from ...wire.own_file import open_regular, read_regular
from .events import Events, Order

# How long a network file system may show an older version of a file.
_STALE_S = 5.0
_PAUSE_S = 0.05
Key = tuple[int, str]


class CodeProblem(Exception):
    """The files cannot be placed; says why."""


@dataclass(eq=False)
class CodeStore:
    """The files of one host. Pure but for the file system.

    Args:
        roots: the notebook's directories.
        directory: where files are placed: ``0`` for the first root, and so on.
        is_own: whether a root of this path would be this host's own, and not shared with the
            notebook's, which is of this boot.
        stale_s: how long a shared directory may show an older version.
    """

    roots: Sequence[str]
    directory: Path
    is_own: Callable[[str, str], bool]
    stale_s: float = _STALE_S
    shared: frozenset[int] | None = None  # the roots that are; decided by the first offer
    _placed: dict[Key, CodeFile] = field(default_factory=dict)
    _wanted: dict[Key, CodeFile] = field(default_factory=dict)
    _sources: dict[bytes, str] = field(default_factory=dict)  # digest -> a file with the content
    _missing: set[bytes] = field(default_factory=set)

    @property
    def places(self) -> tuple[str, ...]:
        """Where ranks import each root's modules from."""
        shared = self.shared or frozenset()
        return tuple(
            root if index in shared else str(self.directory / str(index))
            for index, root in enumerate(self.roots)
        )

    def offer(
        self, roots: Sequence[int], files: Sequence[CodeFile], boot: str = ""
    ) -> tuple[bytes, ...]:
        """Take note of the files that are to be in some roots, and return which contents are
        missing.

        Raises:
            CodeProblem: a path leads outside, or a shared directory shows other files.
        """
        for file in files:
            if not (is_inside(file.path) and 0 <= file.root < len(self.roots)):
                raise CodeProblem(f"a file was offered at {file.path!r}, which is no place here")
        if self.shared is None:
            self.shared = self._find_shared(files, boot)
        for file in files:
            if file.root in self.shared:
                self._await_shared(file)
        self._wanted = {key: file for key, file in self._placed.items() if key[0] not in roots}
        self._wanted |= {(f.root, f.path): f for f in files if f.root not in self.shared}
        self._sources = {file.digest: self._path(key) for key, file in self._placed.items()}
        self._missing = set()
        for key, file in self._wanted.items():
            if file.digest not in self._sources and not self._has_own(key, file):
                self._missing.add(file.digest)
        return tuple(sorted(self._missing))

    def take(self, digests: Sequence[bytes], contents: Sequence[Frame]) -> bool:
        """Keep contents that were missing; return whether none is missing any more.

        Raises:
            CodeProblem: a content is not what was announced, or there is no space.
        """
        for digest, content in zip(digests, contents, strict=True):
            if digest not in self._missing or digest_of(content) != digest:
                raise CodeProblem("a file has arrived that was not asked for")
            path = self._new / digest.hex()
            with _space(path):
                self._new.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(content)
            self._sources[digest] = str(path)
            self._missing.discard(digest)
        return not self._missing

    def place(self) -> None:
        """Put all files that were offered into their places, and remove others.

        Everything is written beside before anything changes.

        Raises:
            CodeProblem: there is no space; nothing has changed.
        """
        changed = [
            (key, file)
            for key, file in self._wanted.items()
            if (old := self._placed.get(key)) is None
            or (old.digest, old.mtime_ns) != (file.digest, file.mtime_ns)
        ]
        drafts = []
        for number, (key, file) in enumerate(changed):
            draft = self._new / str(number)
            with _space(draft):
                self._new.mkdir(mode=0o700, parents=True, exist_ok=True)
                content = read_regular(self._sources[file.digest], file.num_bytes)
                if digest_of(content) != file.digest:
                    raise CodeProblem(f"{self._sources[file.digest]} changes while it is read")
                draft.write_bytes(content)
                os.utime(draft, ns=(file.mtime_ns, file.mtime_ns))
            drafts.append((key, file, draft))
        for key in self._placed.keys() - self._wanted.keys():
            self._remove(key)
        for key, file, draft in drafts:
            self._make_parents(key)
            _forget_compiled(self._path(key))
            os.replace(draft, self._path(key))
            self._placed[key] = file
        self.clear()

    def clear(self) -> None:
        """Remove what has arrived and is in no place."""
        shutil.rmtree(self._new, ignore_errors=True)

    @property
    def _new(self) -> Path:
        return self.directory / "new"

    def _path(self, key: Key) -> str:
        return f"{self.directory}/{key[0]}/{key[1]}"

    def _find_shared(self, files: Sequence[CodeFile], boot: str) -> frozenset[int]:
        """The roots whose files are the very same here: they have the same inodes and times."""
        own = {index for index, root in enumerate(self.roots) if self.is_own(root, boot)}
        own |= {file.root for file in files if not self._is_same(file)}
        return frozenset(file.root for file in files) - own

    def _is_same(self, file: CodeFile) -> bool:
        try:
            status = os.stat(f"{self.roots[file.root]}/{file.path}")
        except OSError:
            return False
        there = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return there == (file.num_bytes, file.mtime_ns, file.ctime_ns, file.inode)

    def _await_shared(self, file: CodeFile) -> None:
        deadline = time.monotonic() + self.stale_s
        while not self._is_same(file):
            if time.monotonic() > deadline:
                raise CodeProblem(
                    f"{self.roots[file.root]}/{file.path} is another file than the notebook's, "
                    "though the directory was shared when the mesh started"
                )
            with (
                contextlib.suppress(OSError),
                open_regular(f"{self.roots[file.root]}/{file.path}"),
            ):
                pass  # upon which NFS looks for a newer version
            time.sleep(_PAUSE_S)

    def _has_own(self, key: Key, file: CodeFile) -> bool:
        """Whether this host has its own copy of the content at the notebook's path."""
        path = f"{self.roots[key[0]]}/{key[1]}"
        try:
            if os.stat(path).st_size != file.num_bytes:
                return False
            if digest_of(read_regular(path, file.num_bytes)) != file.digest:
                return False
        except OSError:
            return False
        self._sources[file.digest] = path
        return True

    def _make_parents(self, key: Key) -> None:
        path = self.directory / str(key[0])
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in key[1].split("/")[:-1]:
            path /= part
            if not path.is_dir() or path.is_symlink():  # a file has become a directory
                path.unlink(missing_ok=True)
                path.mkdir(mode=0o700)

    def _remove(self, key: Key) -> None:
        path = Path(self._path(key))
        _forget_compiled(str(path))
        path.unlink(missing_ok=True)
        del self._placed[key]
        with contextlib.suppress(OSError):  # the directory of other files
            for parent in path.parents:
                if parent.parent == self.directory:
                    break
                with contextlib.suppress(FileNotFoundError):
                    (parent / "__pycache__").rmdir()
                parent.rmdir()


@contextlib.contextmanager
def _space(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise CodeProblem(f"cannot write {path}: {error.strerror}") from error


def _forget_compiled(path: str) -> None:
    """Remove the .pyc files of a source file: Python would use them for a new text of the same size
    that was written within the same second.
    """
    directory, _, name = path.rpartition("/")
    stem, _, suffix = name.rpartition(".")
    if suffix == "py":
        for compiled in Path(directory, "__pycache__").glob(f"{stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def is_own(path: str, boot: str) -> bool:
    """Whether files of this host with the numbers of the notebook's may be others all the same.

    An overlay of a container has its lower part in common with other containers, and a disk that
    was cloned keeps all inodes and times. So a directory is believed to be shared only on a file
    system that hosts can share, or where the notebook is on this very machine.

    Args:
        path: of a directory.
        boot: of the notebook's host (`Place.boot`).
    """
    kind = filesystem_of(path)
    is_one_machine = boot == this_place().boot != ""
    return kind == "overlay" or not (is_one_machine or kind in SHARED_FILESYSTEMS)


class CodeFiles:
    """An agent's part in keeping the user's files the same on all hosts.

    Args:
        store: the host's files.
        events: the agent's.
        answer: sends an answer to the controller.
        take_places: called with where ranks import each root's modules from, once they are there.
    """

    def __init__(
        self,
        store: CodeStore,
        events: Events,
        answer: Callable[[FilesAnswer], None],
        take_places: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._store = store
        self._events = events
        self._answer, self._take_places = answer, take_places
        self._jobs: queue.SimpleQueue[tuple[OfferFiles | SendFiles, Sequence[Frame]]] = (
            queue.SimpleQueue()
        )
        self._answers: queue.SimpleQueue[FilesAnswer | None] = queue.SimpleQueue()
        self._news = -1
        self._has_failed = False

    def handle(self, verb: OfferFiles | SendFiles, buffers: Sequence[Frame]) -> None:
        """Begin to do what the controller asks for."""
        if self._news < 0:
            self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._events.add(self._news, Order.SOCKET, lambda event: self._report())
            threading.Thread(target=self._work, name="cellmesh-files", daemon=True).start()
        self._jobs.put((verb, buffers))

    def _report(self) -> None:
        os.eventfd_read(self._news)
        while not self._answers.empty():
            answer = self._answers.get()
            if answer is None:
                continue
            if not (answer.missing or answer.problem):
                self._take_places(self._store.places)
            self._answer(answer)

    def _work(self) -> None:
        while True:
            verb, buffers = self._jobs.get()
            self._answers.put(self._do(verb, buffers))
            os.eventfd_write(self._news, 1)

    def _do(self, verb: OfferFiles | SendFiles, buffers: Sequence[Frame]) -> FilesAnswer | None:
        """Return the answer to a message; None if more messages follow, or one has failed."""
        try:
            if isinstance(verb, OfferFiles):
                self._has_failed = False
                if missing := self._store.offer(verb.roots, verb.files, verb.boot):
                    return FilesAnswer(verb.request, missing)
            elif self._has_failed or not self._store.take(verb.digests, buffers):
                return None
            self._store.place()
            return FilesAnswer(verb.request)
        except Exception as error:  # also what the file system has that nobody thought of
            self._has_failed = True
            self._store.clear()
            text = (
                str(error) if isinstance(error, CodeProblem) else f"{type(error).__name__}: {error}"
            )
            return FilesAnswer(verb.request, problem=text)
