"""Saves variables of the ranks with torch.distributed.checkpoint (DCP), all or nothing, and answers
the requests about checkpoints on a rank.

Ranks save within the run, by ``dcp.save`` into a directory beside the checkpoint; rank 0 puts it in
the checkpoint's place in one step when all files are on disk.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import HostError, MeshUsageError
from ...wire.checkpoint import AnyRequest, CheckLoad, CheckSave, LoadNames, SaveNames
from ...wire.codec import Frame
from ...wire.ranks import describe_groups
from .directory import CheckpointDirectory
from .loading import find_cut_file, find_load_problem, load
from .state import find_save_problem, key_of, plain_digests, read_state

if TYPE_CHECKING:
    from ..rank.features import RankContext

_MAX_NAMED = 3


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

    def handle_beside(self, request: AnyRequest) -> Any:
        """Raise NotImplementedError: requests about checkpoints are answered on the main thread
        only.
        """
        raise NotImplementedError(request)


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

    found = _agree(read)
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


def _agree(step: Callable[[], Any]) -> list[Any]:
    """Run a step of a save on every rank, and return each rank's result; a collective.

    Raises:
        MeshUsageError: on all ranks, if the step has failed on some.
    """
    problem, mine = "", None
    try:
        mine = step()
    except Exception as error:  # the others wait for this rank's answer
        text = str(error)
        problem = text if isinstance(error, MeshUsageError) else f"{type(error).__name__}: {text}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (problem, mine))
    problems = describe_groups({rank: text for rank, (text, _) in enumerate(found)})
    if problems:
        raise MeshUsageError(f"nothing was saved: {'; '.join(problems[:_MAX_NAMED])}")
    return [value for _, value in found]
