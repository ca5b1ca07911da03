"""The public `Mesh`, which `start` and `attach` return."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import HostError, MeshUsageError
from ..wire.groups import SetMesh
from ..wire.messages import LogText
from ..wire.status import HostReport, RankInfo
from .checkpoint import save
from .core.effects import HealReport
from .failure_summary import explain_waits
from .mesh_dims import check_mesh, parse_mesh
from .rank_set import RankSet
from .ranks import Ranks
from .replicas import copy_names
from .resizing import plan_resize
from .run import Run
from .session.life import StartProgress
from .session.session import Session

# An expression is no work that fills a new rank, as a call is.
_MODULES = "__import__('cellmesh.wire.modules', fromlist=[''])"


class Mesh(Ranks):
    """A mesh of persistent ranks; ends with `stop`, with its ``with`` block, or with this process.

    Made by `start`.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(RankSet(session, range(session.num_ranks)))

    @property
    def name(self) -> str:
        """The mesh's name, as ``cellmesh ps`` lists it."""
        return self.rank_set.session.name

    @property
    def tabs(self) -> bool:
        """Whether cells whose ranks show different things get a switch to one rank's output."""
        return self.rank_set.session.displays.has_tabs

    @tabs.setter
    def tabs(self, shown: bool) -> None:
        self.rank_set.session.displays.has_tabs = shown

    @property
    def fold_numbers(self) -> bool:
        """Whether lines of ranks that differ only in numbers are shown as one, with their span."""
        return self.rank_set.session.displays.folds_numbers

    @fold_numbers.setter
    def fold_numbers(self, folded: bool) -> None:
        self.rank_set.session.displays.folds_numbers = folded

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of the DeviceMesh's dims by their names."""
        return dict(self.rank_set.session.dims)

    @property
    def alive(self) -> bool:
        """Whether the mesh is ready to run cells and calls."""
        return self.rank_set.session.state == "ready"

    @property
    def runs(self) -> tuple[Run[Any], ...]:
        """The runs that have not ended, oldest first; after an attach, also those that were in
        flight then.
        """
        return self.rank_set.session.runs.all()

    @property
    def start_s(self) -> float:
        """How long the start or the last restart took, in seconds."""
        return self.rank_set.session.life.start_s

    @property
    def ready_ranks(self) -> Sequence[RankInfo]:
        """The ranks' processes and devices, as they were when the mesh became ready."""
        return self.rank_set.session.core.mesh.ranks

    def log_path(self, rank: int) -> Path:
        """Return the path of the log with everything that a rank has printed; it is removed when
        the mesh ends.

        Raises:
            MeshUsageError: the mesh is on many hosts, where the logs are (`read_log`).
        """
        session = self.rank_set.session
        if session.has_hosts:
            raise MeshUsageError("the logs of a mesh on many hosts are there: mesh.read_log(rank)")
        return session.ticket.logs / f"rank{rank}.log"

    def reshape(self, dims: Mapping[str, int] | str) -> None:
        """Give each rank's DeviceMesh ``mesh`` other dims. Blocks; waits for what the ranks run.

        Args:
            dims: name -> size, or ``dp=2,tp=4``; the product is the number of ranks.

        Raises:
            MeshUsageError: the product is another number.
        """
        shape = check_mesh(parse_mesh(dims) if isinstance(dims, str) else dims, len(self))
        self.rank_set.start(SetMesh(0, tuple(shape), tuple(shape.values())), "the reshape").result()
        self.rank_set.session.reshaped(shape)

    def resize(
        self,
        num_ranks: int | None = None,
        *,
        hosts: str | Iterable[str] = (),
        mesh: Mapping[str, int] | str | None = None,
    ) -> HealReport:
        """Give the mesh another number of ranks, between cells. Blocks.

        The highest ranks end, or new ones follow, on the last host or on hosts that join. Ranks
        that stay keep their process and their names, and get process groups and a ``mesh`` of the
        new size. What holds groups of the old size (DTensors, models in DDP or FSDP) must be made
        again: `save` before and `load` after carry its values over.

        Args:
            num_ranks: how many ranks there are to be; may be left out where `hosts` or `mesh` says
                so.
            hosts: that join, ``"c:2"``, of a mesh on hosts.
            mesh: the DeviceMesh's dims then; needed if there is more than one.

        Returns:
            What was done; its notes list names that are bound to the old size.

        Raises:
            MeshUsageError: the size cannot be, a rank runs something or is dead; nothing has
                changed.
            HostError: a host could not join, and nothing has changed; or new ranks could not be
                started, and the mesh has the new size without them (`heal`).
        """
        session = self.rank_set.session
        plan = plan_resize(
            num_ranks,
            hosts,
            mesh,
            layout=session.ticket.layout,
            names=session.host_names,
            dims=session.dims,
        )
        try:
            report = session.resize(plan)
        finally:  # also where the user waits for it no longer
            self.rank_set = RankSet(session, range(session.num_ranks))
            self.ranks = self.rank_set.ranks
        if report.failure:
            raise HostError(report.failure)
        return report

    def save(self, *names: str, path: str | os.PathLike[str], wait: bool = True) -> None:
        """Save variables of the ranks as one checkpoint (``torch.distributed.checkpoint``). Blocks.

        The checkpoint at `path` stays until the new one is whole on disk, and is then replaced in
        one step.

        Args:
            names: modules, optimizers, anything with a ``state_dict``, DTensors, tensors, plain
                values.
            path: a directory; made if need be.
            wait: must be True: ``dcp.async_save`` in a cell writes in the background.

        Raises:
            MeshUsageError: something cannot be saved; nothing has been written then.
            RankFailure: it could not be written; the checkpoint at `path` is as it was.
        """
        save(self.rank_set, names, path, wait)

    def report(self) -> Sequence[RankInfo]:
        """Return each rank's process, device and memory, as the agent measures them."""
        answer: HostReport | None = self.rank_set.session.ask_host()
        return answer.ranks if answer is not None else ()

    def why(self) -> str:
        """Say why the mesh does not go on: which operations can never meet, or which ranks wait for
        which others, and what these do. Waits at most a second.
        """
        session = self.rank_set.session
        return explain_waits(self.states(), session.dead_ranks, len(self))

    def read_log(self, rank: int, num_bytes: int = 1 << 20) -> LogText | None:
        """Read the end of everything that a rank has printed.

        Args:
            rank: which.
            num_bytes: how much of it.

        Returns:
            The text and how much lies before it; None if the mesh has ended.

        Raises:
            MeshUsageError: there is no such rank.
        """
        if rank not in self.ranks:
            raise MeshUsageError(f"there is no rank {rank}: the mesh has 0-{len(self) - 1}")
        return self.rank_set.session.ask_log(rank, num_bytes)

    def heal(self, source: int | None = None, *, hosts: str | Iterable[str] = ()) -> HealReport:
        """Replace dead ranks by new ones, and rebuild the process groups where that is needed.
        Blocks.

        Living ranks keep everything. It happens by itself after a failed cell, as far as no rank is
        dead.

        Args:
            source: a living rank whose names are copied to ranks that are new; None leaves them
                empty.
            hosts: new ones, each in the place of a lost host: ``"c:4"``, or ``"c"`` for the ranks
                of any. A lost host that is named itself is started again, and what it holds is
                given up.

        Returns:
            What was done, and which names were copied and which not.

        Raises:
            MeshUsageError: ranks still run something, `source` cannot give anything, or a host of
                `hosts` has no lost one's place to take.
            HostError: it did not work out; what lives is as it was.
        """
        if source is not None:
            self._check_source(source)
        began_at = time.monotonic()
        report = self.rank_set.session.heal(hosts)
        if report.failure:
            busy = "must be idle" in report.failure
            raise MeshUsageError(report.failure) if busy else HostError(report.failure)
        empty, dead = self._empty_ranks(), self.rank_set.session.dead_ranks
        targets = sorted(empty - {source} - dead)
        if source is None or not targets:
            return dataclasses.replace(report, empty=tuple(targets))
        others = [rank for rank in self.ranks if rank not in targets and rank not in dead]
        copied, refused = copy_names(
            self.rank_set.part((source,), is_single=True),
            self.rank_set.part(targets),
            self.rank_set.part(others),
        )
        took_s = time.monotonic() - began_at
        return dataclasses.replace(
            report, copied=copied, not_copied=refused, copied_to=tuple(targets), took_s=took_s
        )

    def _empty_ranks(self) -> set[int]:
        """Return the ranks that replaced dead ones and have been given no names since."""
        return {info.rank for info in self.report() if info.predecessor_ending}

    def _check_source(self, source: int) -> None:
        if source not in self.ranks:
            raise MeshUsageError(f"there is no rank {source}: the mesh has 0-{len(self) - 1}")
        if source in self.rank_set.session.dead_ranks:
            raise MeshUsageError(
                f"rank {source} is dead, so nothing can be copied from it: choose a living rank"
            )
        if source in self._empty_ranks():
            raise MeshUsageError(
                f"rank {source} is new itself and holds nothing: choose another rank"
            )

    def restart(
        self, timeout_s: float = 60.0, on_progress: Callable[[StartProgress], None] | None = None
    ) -> str:
        """Replace every rank by a new one, forked from the zygote; what ranks held is lost. Blocks.

        The new ranks take the environment variables and the working directory that have changed
        here since the start, the attach or the last restart.

        Args:
            timeout_s: how long it may take, in seconds.
            on_progress: told how far it has come; called on another thread.

        Returns:
            What they take, in a sentence; "" for nothing.

        Raises:
            NoMeshError: the mesh has ended.
            HostError: the new ranks did not come up; the mesh has ended.
        """
        return self.rank_set.session.restart(timeout_s, on_progress)

    def reload(self) -> tuple[str, ...]:
        """Reload the user's modules on all ranks whose files have changed since a rank loaded them;
        objects of theirs go on with the new code (IPython's autoreload). Blocks.

        On many hosts, the hosts are sent the files first.

        Returns:
            The names of the modules that were reloaded on some rank.

        Raises:
            RankFailure: a module could not be loaded; it is as it was.
        """
        if (code := self.rank_set.session.code) is not None:
            code.bring()
        names = self.pull(f"{_MODULES}.loaded.reload_changed()")
        return tuple(sorted({name for each in names.list for name in each}))

    def detach(self) -> None:
        """Leave the mesh; it lives until its lease ends, and `attach` finds it again. Blocks.

        Raises:
            MeshUsageError: it has no lease.
            NoMeshError: it has ended.
        """
        self.rank_set.session.detach()

    def stop(self) -> None:
        """End every process of the mesh and wait until they have gone. Calling it again does
        nothing.
        """
        self.rank_set.session.stop()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<cellmesh {self}>"

    def __str__(self) -> str:
        return str(self.rank_set.session)
