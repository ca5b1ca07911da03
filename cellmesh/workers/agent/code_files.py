"""Keeps copies of the user's modules on this host in step with those beside the notebook.

The mesh's directory has a subdirectory ``code``. Each version of the files is a directory there,
with one subdirectory for each import root of the notebook (`Ticket.roots`); the link ``current``
points to the version that ranks import from. A new version is written to a draft directory, and
becomes current in one step.

Files are written on a separate thread, as the agent must react at once when a process ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ...wire.codec import Frame
from ...wire.hosts import CodeFile, FilesAnswer, PlaceFiles, is_inside
from .events import Events, Order

# How long a slow file system may delay the end of the agent.
_CLOSE_S = 5.0


class CodeStore:
    """The copies of the user's Python files on one host, from which its ranks import.

    Args:
        num_roots: number of the notebook's import roots.
        directory: directory for the copies.
    """

    def __init__(self, num_roots: int, directory: Path) -> None:
        self._directory, self._current = directory, directory / "current"
        self.places = tuple(str(self._current / str(index)) for index in range(num_roots))
        self.name = ""
        self._has_ended = False

    def end(self) -> None:
        """Make a running call of `CodeStore.place`, on another thread, and all later calls fail
        before they write the next file.
        """
        self._has_ended = True

    def place(self, order: PlaceFiles, archive: bytes) -> None:
        """Switch ranks' imports to a new version of the user's files; do nothing if it is already
        in place, or if it consists of changes to a version that is not in place.

        Raises:
            ValueError: a path leads outside the directory; nothing has changed.
            OSError: the disk is full; nothing has changed.
        """
        if order.name == self.name or order.base not in ("", self.name):
            return
        files = msgspec.msgpack.decode(archive, type=list[CodeFile])
        for path in (*order.removed, *(file.path for file in files)):
            if not is_inside(path):
                raise ValueError(f"a file is to be placed at {path!r}, which is no place here")
        draft, placed = self._directory / "draft", self._directory / order.name
        for left in (draft, placed):
            shutil.rmtree(left, ignore_errors=True)
        try:
            self._write(draft, order, files)
            draft.rename(placed)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        link = self._directory / "next"
        link.unlink(missing_ok=True)
        link.symlink_to(order.name)
        link.replace(self._current)
        if self.name:
            shutil.rmtree(self._directory / self.name, ignore_errors=True)
        self.name = order.name

    def _write(self, draft: Path, order: PlaceFiles, files: Sequence[CodeFile]) -> None:
        if order.base:  # without .pyc files, which Python checks only by size and second of change
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(self._directory / order.base, draft, ignore=without)
        for name in order.removed:
            (draft / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # if the directory still has files
                os.removedirs((draft / name).parent)
        for index in range(len(self.places)):
            (draft / str(index)).mkdir(parents=True, exist_ok=True)
        for file in files:
            if self._has_ended:
                raise OSError("the mesh ends")
            path = draft / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


class CodeFiles:
    """Receives the user's files from the controller, and places them on a separate thread.

    Args:
        store: copies of the files on this host.
        events: the agent's event loop.
        answer: sends an answer to the controller.
        take_places: called with the directories that ranks import from, once files are placed.
    """

    def __init__(
        self,
        store: CodeStore,
        events: Events,
        answer: Callable[[FilesAnswer], None],
        take_places: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._store, self._events = store, events
        self._answer, self._take_places = answer, take_places
        self._orders: queue.SimpleQueue[tuple[PlaceFiles, bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[FilesAnswer] = queue.SimpleQueue()
        self._request, self._parts = -1, list[bytes]()
        self._news = -1
        self._thread = threading.Thread(target=self._work, name="cellmesh-files", daemon=True)

    def close(self) -> None:
        """Stop writing files, before the mesh's directory is removed."""
        if self._news >= 0:
            self._store.end()
            self._orders.put(None)
            self._thread.join(_CLOSE_S)

    def handle(self, order: PlaceFiles, buffers: Sequence[Frame]) -> None:
        """Add one part of an archive of the user's files; after the last part, start to write the
        files.
        """
        if self._news < 0:
            self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._events.add(self._news, Order.SOCKET, lambda event: self._report())
            self._thread.start()
        if order.request != self._request:  # the controller that sent the other parts has left
            self._request, self._parts = order.request, []
        self._parts.append(bytes(buffers[0]))
        if order.is_last:
            self._orders.put((order, b"".join(self._parts)))
            self._parts = []

    def _report(self) -> None:
        os.eventfd_read(self._news)
        while not self._answers.empty():
            answer = self._answers.get()
            if answer.name and not answer.problem:
                self._take_places(self._store.places)
            self._answer(answer)

    def _work(self) -> None:
        while (received := self._orders.get()) is not None:
            order, archive = received
            problem = ""
            try:
                self._store.place(order, archive)
            except OSError as error:
                problem = f"cannot write {error.filename or 'files'}: {error.strerror or error}"
            except Exception as error:  # whatever fails, the controller waits for an answer
                problem = f"{type(error).__name__}: {error}"
            self._answers.put(FilesAnswer(order.request, self._store.name, problem))
            os.eventfd_write(self._news, 1)
