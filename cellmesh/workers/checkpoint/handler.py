"""Saves variables of the ranks with torch.distributed.checkpoint (DCP), all or nothing, and answers
the requests about checkpoints on a rank.

Ranks save within the run, by ``dcp.save`` into a directory beside the checkpoint; rank 0 puts it in
the checkpoint's place in one step when all files are on disk (``renameat2``). Where a file system
cannot do that (NFS), the old one steps aside first, and a load or save that finds it so puts it
back. The directory beside has a name of its own for each save, and rank 0 locks it until the save
ends: the next save removes an unlocked one, whose save has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import HostError
from ...wire.checkpoint import AnyRequest, CheckLoad, CheckSave, LoadNames, SaveNames
from ...wire.codec import Frame
from ...wire.ranks import describe_groups
from ..replicas.syncing import agree
from .loading import find_cut_file, find_load_problem, load
from .state import find_save_problem, key_of, plain_digests, read_state

if TYPE_CHECKING:
    from ..rank.features import RankContext

_MAX_NAMED = 3
METADATA = ".metadata"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})


class CheckpointHandler:
    """Answers requests to check, save and load checkpoints on one rank.

    Args:
        context: of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._namespace = context.shell.user_ns

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        namespace, names, path = self._namespace, request.names, Path(request.path)
        match request:
            case CheckSave():
                return find_save_problem(namespace, names) or CheckpointDirectory(path).why_not()
            case SaveNames():
                return save(namespace, names, path)
            case CheckLoad():
                why = CheckpointDirectory(path).why_no_checkpoint()
                return why or find_load_problem(namespace, names, path)
            case LoadNames():
                return load(namespace, names, path)


make_handler = CheckpointHandler


class _Writer(FileSystemWriter):
    """A DCP writer that puts the new checkpoint in the old one's place when it is whole.

    Args:
        directory: of the checkpoint.
        beside: the directory that the new checkpoint is written to.
        held: ends when the save has ended.
    """

    def __init__(
        self, directory: CheckpointDirectory, beside: Path, held: contextlib.ExitStack
    ) -> None:
        super().__init__(beside, sync_files=True, single_file_per_rank=True)
        self._directory, self._beside, self._held = directory, beside, held

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory beside, on rank 0; DCP raises an error of it on all ranks."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._held.enter_context(self._directory.open_beside(self._beside))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and exchange the directories; DCP calls this on rank 0 when all ranks
        have written their files.
        """
        super().finish(metadata, results)
        parts = [written.storage_data for each in results for written in each]
        if name := find_cut_file(self._beside, parts):
            raise FileNotFoundError(f"{name} is not in {self._beside}: do all hosts share it?")
        self._directory.put(self._beside)


def save(namespace: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Save variables as a checkpoint; a collective of all ranks.

    Args:
        namespace: of the rank.
        names: of the variables.
        path: of the checkpoint.

    Raises:
        MeshUsageError: some cannot be saved; nothing has been written.
        HostError: they could not be written; the checkpoint at `path` is as it was.
    """
    directory, rank = CheckpointDirectory(path), dist.get_rank()
    state = {}

    def read() -> tuple[str, dict[str, Any]]:
        state.update(read_state(namespace, names))
        return secrets.token_hex(4), plain_digests(state)

    found = agree(read, "nothing was saved")
    keyed = {
        key_of(name, rank, [digests[name] for _, digests in found]): state[name].tree
        for name in names
    }
    beside = directory.name_beside(found[0][0])
    with contextlib.ExitStack() as held:
        try:
            state_dict_saver.save(keyed, storage_writer=_Writer(directory, beside, held))
        except CheckpointException as error:  # on all ranks alike; a BaseException
            shutil.rmtree(beside, ignore_errors=True)  # each host's, where they do not share it
            reasons = {rank: reason for rank, (reason, _) in sorted(error.failures.items())}
            for reason in reasons.values():
                if isinstance(reason, KeyboardInterrupt):
                    raise reason from None
            told = describe_groups({r: f"{type(e).__name__}: {e}" for r, e in reasons.items()})
            raise HostError(
                f"not saved: {'; '.join(told[:_MAX_NAMED])}; {directory.describe_target()}"
            ) from None


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
