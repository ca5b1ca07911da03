"""Saves variables of the ranks with torch.distributed.checkpoint (DCP), all or nothing.

A save has two parts. On the main thread, in step with the other ranks: DCP's plan of who writes
what, and a copy of what this rank is to write. Then, on a thread and without collectives, so that
whatever befalls process groups meanwhile is no matter: each rank writes its files into a directory
beside the checkpoint and leaves a mark; when all have, rank 0 puts that directory in the
checkpoint's place in one step (`place`).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ...errors import HostError, MeshUsageError
from ...wire.ranks import describe_groups, describe_ranks
from .directory import CheckpointDirectory
from .loading import find_load_problem, load
from .state import State, find_save_problem, key_of, plain_digests, read_state

_LOOK_S = 0.02
_MAX_NAMED = 3


class Checkpoints:
    """Saves and loads checkpoints on one rank; at most one save is in progress.

    Args:
        namespace: the rank's.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._saving: _Saving | None = None

    def check_save(self, names: Sequence[str], path: str) -> str:
        """Return why this rank cannot save these variables, or ""; runs no collective."""
        self.finish()
        return (
            find_save_problem(self._namespace, names) or CheckpointDirectory(Path(path)).why_not()
        )

    def save(self, names: Sequence[str], path: str, waits: bool) -> None:
        """Save variables to a path; a collective of all ranks; waits for an earlier save.

        Args:
            names: of the namespace.
            path: of the checkpoint.
            waits: come back when it is on disk, not when the state has been copied.

        Raises:
            MeshUsageError: it cannot be saved; nothing was written then.
            HostError: it could not be written; what was at `path` is still there.
        """
        self.finish()
        saving = _prepare(self._namespace, names, CheckpointDirectory(Path(path)), tells=not waits)
        self._saving = saving
        threading.Thread(target=saving.run, name="cellmesh-save", daemon=True).start()
        if waits:
            self.finish()
            if saving.problem:
                raise HostError(saving.problem)

    def check_load(self, names: Sequence[str], path: str) -> str:
        """Return why this rank cannot load these variables, or ""; runs no collective."""
        self.finish()
        why = CheckpointDirectory(Path(path)).why_no_checkpoint()
        return why or find_load_problem(self._namespace, names, Path(path))

    def load(self, names: Sequence[str], path: str) -> tuple[str, ...]:
        """Load variables in place, after a save in progress. Runs no collectives but those of FSDP1
        models.

        Args:
            names: which; none for all that the checkpoint has.
            path: of the checkpoint.

        Returns:
            What was loaded.
        """
        self.finish()
        return load(self._namespace, names, Path(path))

    def finish(self) -> None:
        """Wait until no save is in progress."""
        # An Event, as a Thread.join that is interrupted takes the thread for ended.
        while self._saving is not None and not self._saving.has_ended.wait(1.0):
            pass
        self._saving = None


class _StagedPlanner(DefaultSavePlanner):
    """A DCP save planner that copies what this rank is to write into host memory, from which
    another thread writes it later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[Any, torch.Tensor | io.BytesIO] = {}

    def stage(self, plan: SavePlan) -> None:
        """Copy the planned tensors into host memory."""
        for item in plan.items:
            data = super().resolve_data(item)
            if isinstance(data, torch.Tensor):
                data = data.detach()
                data = data.clone() if data.device.type == "cpu" else data.cpu()
            self.staged[item.index] = data
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.staged[write_item.index]


@dataclass
class _Saving:
    """A save in progress, whose tensors were copied to host memory and are written by a thread.

    Attributes:
        rank: this one.
        names: what is saved.
        place: where.
        writer: writes into the directory beside.
        plan: what this rank writes.
        planner: has it.
        metadata: of the whole checkpoint; on rank 0 only.
        peers: pidfd -> rank of the others.
        began_at: by the monotonic clock.
        tells: whether its end is to be printed.
        problem: why it failed; "" if it did not.
        has_ended: nothing is being written any more.
    """

    rank: int
    names: tuple[str, ...]
    place: CheckpointDirectory
    writer: FileSystemWriter
    plan: SavePlan
    planner: _StagedPlanner
    metadata: Metadata | None
    peers: dict[int, int]
    began_at: float
    tells: bool
    problem: str = ""
    has_ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write the checkpoint's files; on a thread of its own."""
        try:
            self._run()
        finally:
            self.has_ended.set()

    def _run(self) -> None:
        rank, dead, why = self.rank, set[int](), ""
        try:
            try:
                results = self.writer.write_data(self.plan, self.planner).wait()
                self.place.mark_written(rank, pickle.dumps(results))
            except BaseException as error:  # the others are to know
                self.place.mark_failed(rank, f"{type(error).__name__}: {error}")
            self.planner.staged.clear()
            why = self._await_end(dead)
        except BaseException as error:
            why = f"rank {rank}: {type(error).__name__}: {error}"
        everyone = {rank, *self.peers.values()}
        if why:
            self.problem = f"not saved: {why}; {self.place.describe_target()}"
        self.place.close(discards=bool(why))
        for descriptor in self.peers:
            os.close(descriptor)
        if self.tells and rank == min(everyone - dead):
            what = ", ".join(self.names)
            took_s = time.monotonic() - self.began_at
            print(
                f"{what}: {self.problem}"
                if why
                else f"{what}: saved in {took_s:.1f} s to {self.place.target}",
                flush=True,
            )

    def _await_end(self, dead: set[int]) -> str:
        """Wait until the checkpoint is in its place, or has failed; rank 0 puts it there.

        Args:
            dead: gets the ranks that have died.

        Returns:
            Why it failed; "" if it did not.
        """
        everyone = sorted({self.rank, *self.peers.values()})
        poll = select.poll()
        for descriptor in self.peers:
            poll.register(descriptor, select.POLLIN)
        while True:
            if self.place.is_there():
                return ""
            failures = self.place.failures()
            if failures:
                return "; ".join(f"rank {r}: {text}" for r, text in failures.items())
            written = self.place.written()
            if self.rank == 0 and written == everyone:
                self._put(everyone)
                return ""
            if self.place.was_removed():
                return "its files were removed while it was written"
            if 0 in dead or not dead <= set(written):
                return f"{describe_ranks(sorted(dead))} died before it was written"
            for descriptor, _ in poll.poll(
                _LOOK_S * 1000
            ):  # the marks of who is dead are looked at once more
                dead.add(self.peers[descriptor])
                poll.unregister(descriptor)

    def _put(self, ranks: Sequence[int]) -> None:
        assert self.metadata is not None
        try:
            results = [pickle.loads(self.place.read_written(rank)) for rank in ranks]
            self.writer.finish(self.metadata, results)
            self.place.put()
        except BaseException as error:
            self.place.mark_failed(0, f"{type(error).__name__}: {error}")
            raise


def _prepare(
    namespace: Mapping[str, Any], names: Sequence[str], place: CheckpointDirectory, tells: bool
) -> _Saving:
    """Plan a save, and copy what this rank writes into host memory; a collective of all ranks."""
    began_at = time.monotonic()
    state: dict[str, State] = {}

    def read() -> tuple[int, str, dict[str, Any]]:
        state.update(read_state(namespace, names))
        return os.getpid(), secrets.token_hex(4), plain_digests(state)

    said = _agree(read)
    rank, token = dist.get_rank(), said[0][1]
    keyed = {
        key_of(name, rank, [digests[name] for _, _, digests in said]): state[name].tree
        for name in names
    }
    planner = _StagedPlanner()

    def plan_mine() -> tuple[FileSystemWriter, SavePlan]:
        place.open_beside(token, cleans_up=rank == 0)
        writer = FileSystemWriter(place.beside, sync_files=True, single_file_per_rank=True)
        planner.set_up_planner(keyed, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer, writer.prepare_local_plan(planner.create_local_plan())

    try:
        mine: list[tuple[FileSystemWriter, SavePlan]] = []

        def note_mine() -> SavePlan:
            mine.append(plan_mine())
            return mine[0][1]

        plans = _agree(note_mine)
        writer = mine[0][0]
        whole: list[Any] = [None] * len(plans)
        metadata: Metadata | None = None

        def plan_all() -> None:
            nonlocal whole, metadata
            if rank == 0:
                whole, metadata = planner.create_global_plan(plans)
                whole = writer.prepare_global_plan(whole)

        _agree(plan_all)
        box: list[Any] = [None]
        dist.scatter_object_list(box, whole if rank == 0 else None, src=0)
        plan = planner.finish_plan(box[0])
        _agree(lambda: planner.stage(plan))
        peers = _open_peers([pid for pid, _, _ in said], rank)
    except BaseException:
        place.close(discards=True)
        raise
    return _Saving(
        rank, tuple(names), place, writer, plan, planner, metadata, peers, began_at, tells
    )


def _open_peers(pids: Sequence[int], rank: int) -> dict[int, int]:
    peers: dict[int, int] = {}
    with contextlib.ExitStack() as opened:
        for other, pid in enumerate(pids):
            if other != rank:
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                peers[descriptor] = other
        opened.pop_all()
    return peers


def _agree(step: Callable[[], Any]) -> list[Any]:
    """Run a step of a save on every rank, and return each rank's result; a collective.

    Raises:
        MeshUsageError: on all ranks, if some could not take it.
    """
    problem, mine = "", None
    try:
        mine = step()
    except Exception as error:  # the others wait for this rank's word
        text = str(error)
        problem = text if isinstance(error, MeshUsageError) else f"{type(error).__name__}: {text}"
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (problem, mine))
    problems = describe_groups({rank: text for rank, (text, _) in enumerate(said)})
    if problems:
        raise MeshUsageError(f"nothing was saved: {'; '.join(problems[:_MAX_NAMED])}")
    return [value for _, value in said]
