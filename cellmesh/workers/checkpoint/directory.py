"""A checkpoint's directory, which is always whole, and the one beside it in which the next is
written.

The directory beside has a name of its own for each save, and a lock that ends with the processes
that write into it: what a dead save has left is known by that, and removed by the next one. The two
change places in one step (``renameat2``). Where a file system cannot do that, the old one steps
aside first; who finds it so afterwards puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

_WRITTEN, _FAILED = ".written-", ".failed-"
_METADATA = ".metadata"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})


class CheckpointDirectory:
    """The directory of a checkpoint, and the one beside it in which a save writes the next
    checkpoint before it takes the first one's place.

    Args:
        target: the checkpoint's directory.
    """

    def __init__(self, target: Path) -> None:
        # Of a link the directory behind it is replaced, and the link stays.
        self.target = self.beside = target.resolve()
        self._directory = -1

    # ---- what is there

    def recover(self) -> None:
        """Put the checkpoint back in place, if a save died between its two renames."""
        if not self.target.exists():
            with contextlib.suppress(OSError):
                self._aside.rename(self.target)

    def why_not(self) -> str:
        """Return why a save must not replace what is at the target; "" if nothing is there, or
        only files of a checkpoint.
        """
        self.recover()
        if not self.target.exists():
            return ""
        if not self.target.is_dir():
            return f"{self.target} is a file: name a directory"
        entries = {entry.name for entry in self.target.iterdir()}
        foreign = sorted(
            name for name in entries if name != _METADATA and not name.endswith(".distcp")
        )
        if foreign:
            return (
                f"{self.target} holds what is no checkpoint's ({', '.join(foreign[:3])}) and "
                "would be replaced: name another directory"
            )
        return ""

    def why_no_checkpoint(self) -> str:
        """Return why there is nothing to load at the target; "" if there is a checkpoint."""
        self.recover()
        if not self.target.exists():
            return f"there is nothing at {self.target}"
        if not (self.target / _METADATA).is_file():
            return (
                f"{self.target} is no checkpoint: %dist_save and dcp.save leave a directory with "
                f"a file {_METADATA} in it"
            )
        return ""

    def describe_target(self) -> str:
        """Describe, after a failed save, what is at the target of the save."""
        is_there = (self.target / _METADATA).is_file()
        return f"{self.target} is as it was" if is_there else f"there is nothing at {self.target}"

    # ---- writing beside

    def open_beside(self, token: str, cleans_up: bool) -> None:
        """Make and lock the directory in which a save is written; every rank of the save calls
        this.

        Args:
            token: of this save.
            cleans_up: remove what dead saves have left.
        """
        self.beside = self.target.with_name(f".{self.target.name}.{token}.saving")
        if cleans_up:
            self._clean_up()
        self.beside.mkdir(parents=True, exist_ok=True)
        self._directory = os.open(self.beside, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._directory, fcntl.LOCK_SH)

    def _clean_up(self) -> None:
        for left in set(self.target.parent.glob(f".{self.target.name}.*.saving")) - {self.beside}:
            with contextlib.suppress(OSError):
                descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(descriptor)
        if self.target.exists():
            shutil.rmtree(self._aside, ignore_errors=True)

    def mark_written(self, rank: int, data: bytes) -> None:
        """Write a marker file: this rank has written its files of the save."""
        self._mark(f"{_WRITTEN}{rank}", data)

    def mark_failed(self, rank: int, text: str) -> None:
        """Write a marker file: this rank could not write its files of the save."""
        with contextlib.suppress(
            OSError
        ):  # the disk may be full, the directory gone: its death is seen then
            self._mark(f"{_FAILED}{rank}", text.encode(errors="replace"))

    def _mark(self, name: str, data: bytes) -> None:
        path = self.beside / name
        half = path.with_name(f"{name}.tmp")
        half.write_bytes(data)
        half.rename(path)

    def written(self) -> list[int]:
        """Return the ranks that have written their files of the save."""
        return sorted(self._marks(_WRITTEN))

    def read_written(self, rank: int) -> bytes:
        """Read the data that a rank has stored with `mark_written`."""
        return (self.beside / f"{_WRITTEN}{rank}").read_bytes()

    def failures(self) -> dict[int, str]:
        """Return, for ranks that could not write their files, why."""
        found = {}
        for rank in sorted(self._marks(_FAILED)):
            with contextlib.suppress(OSError):
                found[rank] = (self.beside / f"{_FAILED}{rank}").read_text(errors="replace")
        return found

    def _marks(self, prefix: str) -> list[int]:
        names = [name for name in os.listdir(self._directory) if name.startswith(prefix)]
        return [int(rank) for name in names if (rank := name.removeprefix(prefix)).isdigit()]

    # ---- its end

    def put(self) -> None:
        """Replace the checkpoint by the one that was written, in one step; remove the old one."""
        for name in os.listdir(self._directory):
            if name.startswith((_WRITTEN, _FAILED)):
                os.unlink(name, dir_fd=self._directory)
        os.fsync(self._directory)
        before = None
        if not self.target.exists():
            self.beside.rename(self.target)
        elif exchange(self.beside, self.target):
            before = self.beside
        else:
            before = self._aside
            self.target.rename(before)
            self.beside.rename(self.target)
        parent = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def is_there(self) -> bool:
        """Return whether the directory that this save has written is the checkpoint at the
        target now.
        """
        try:
            return os.path.samestat(self.target.stat(), os.fstat(self._directory))
        except OSError:
            return False

    def was_removed(self) -> bool:
        """Return whether the save's directory is gone without having become the checkpoint."""
        return not self.beside.exists() and not self.is_there()

    def close(self, discards: bool) -> None:
        """Unlock the directory of the save.

        Args:
            discards: the save has failed: the last rank to let go removes the directory.
        """
        if self._directory < 0:
            return
        if discards:
            with contextlib.suppress(OSError):  # others hold it
                fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self.is_there():
                    shutil.rmtree(self.beside, ignore_errors=True)
        os.close(self._directory)
        self._directory = -1

    @property
    def _aside(self) -> Path:
        return self.target.with_name(f".{self.target.name}.before")


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two directories in one step.

    Returns:
        False if the file system cannot.
    """
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
