"""A checkpoint's directory, which is always whole, and the one beside it in which the next is
written.

The directory beside has a name of its own for each save, and rank 0 locks it until the save ends:
the next save removes an unlocked one, whose save has died. The two change places in one step
(``renameat2``). Where a file system cannot do that (NFS), the old one steps aside first, and a load
or save that finds it so puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

METADATA = ".metadata"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})


class CheckpointDirectory:
    """The directory of a checkpoint.

    Args:
        target: its path. Of a link the directory behind it is replaced, and the link stays.
    """

    def __init__(self, target: Path) -> None:
        self.target = target.resolve()
        self._aside = self.target.with_name(f".{self.target.name}.before")

    def why_not(self) -> str:
        """Return why a save must not replace the target; "" if nothing is there, or only files of
        a checkpoint.
        """
        self._recover()
        if not self.target.exists():
            return ""
        if not self.target.is_dir():
            return f"{self.target} is a file: name a directory"
        foreign = sorted(
            entry.name
            for entry in self.target.iterdir()
            if entry.name != METADATA and entry.suffix != ".distcp"
        )
        if foreign:
            return (
                f"{self.target} holds what is no checkpoint's ({', '.join(foreign[:3])}) and "
                "would be replaced: name another directory"
            )
        return ""

    def why_no_checkpoint(self) -> str:
        """Return why there is nothing to load at the target; "" if there is a checkpoint."""
        self._recover()
        if not self.target.exists():
            return f"there is nothing at {self.target}"
        if not (self.target / METADATA).is_file():
            return (
                f"{self.target} is no checkpoint: %dist_save and dcp.save leave a directory with "
                f"a file {METADATA} in it"
            )
        return ""

    def describe_target(self) -> str:
        """Describe, after a failed save, the state of the target."""
        is_there = (self.target / METADATA).is_file()
        return f"{self.target} is as it was" if is_there else f"there is nothing at {self.target}"

    def name_beside(self, token: str) -> Path:
        """Return the path of the directory in which the save with this token is written."""
        return self.target.with_name(f".{self.target.name}.{token}.saving")

    @contextlib.contextmanager
    def open_beside(self, beside: Path) -> Iterator[None]:
        """Enter a context with a new, locked directory beside the target, which is removed at the
        end, as are those of dead saves.
        """
        pattern = f".{glob.escape(self.target.name)}.*.saving"
        for left in set(self.target.parent.glob(pattern)) - {beside}:
            with contextlib.suppress(OSError), _lock(left):
                shutil.rmtree(left, ignore_errors=True)
        if self.target.exists():
            shutil.rmtree(self._aside, ignore_errors=True)
        beside.mkdir(parents=True, exist_ok=True)  # another rank may have been the first
        with _lock(beside):
            try:
                yield
            finally:  # the save has failed, or this is the old checkpoint now
                shutil.rmtree(beside, ignore_errors=True)

    def put(self, beside: Path) -> None:
        """Replace the target by the directory beside, in one step if the file system can."""
        _sync(beside)
        if not self.target.exists():
            beside.rename(self.target)
        elif not exchange(beside, self.target):
            self.target.rename(self._aside)
            try:
                beside.rename(self.target)
            finally:
                self._recover()
        _sync(self.target.parent)
        shutil.rmtree(self._aside, ignore_errors=True)

    def _recover(self) -> None:
        """Put the checkpoint back in place, if a save has died between its two renames."""
        if not self.target.exists():
            with contextlib.suppress(OSError):
                self._aside.rename(self.target)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two directories in one step; return False if the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an older C library
        return False
    if not rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(second))


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Enter a context in which this process alone holds the lock of a directory; OSError if another
    process holds it. The lock ends with the process.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
