"""The public `Mesh`, which `start` and `attach` return."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import HostError, MeshUsageError
from ..wire.groups import SetMesh
from ..wire.mesh_dims import check_mesh, parse_mesh
from ..wire.messages import LogText
from ..wire.status import HostReport, RankInfo
from .core.effects import HealReport
from .failure_summary import explain_waits
from .rank_set import RankSet
from .ranks import Ranks
from .run import Run
from .session.life import StartProgress
from .session.session import Session
from .status import LOG_BYTES

if TYPE_CHECKING:
    from .actors import Actor

# An expression, as a call would mark new ranks as no longer empty.
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
        """Whether cells whose ranks' output differs get a switch to the output of one rank."""
        return self.rank_set.session.displays.has_tabs

    @tabs.setter
    def tabs(self, shown: bool) -> None:
        self.rank_set.session.displays.has_tabs = shown

    @property
    def fold_numbers(self) -> bool:
        """Whether ranks' lines that differ only in numbers are shown as one line with ranges."""
        return self.rank_set.session.displays.folds_numbers

    @fold_numbers.setter
    def fold_numbers(self, folded: bool) -> None:
        self.rank_set.session.displays.folds_numbers = folded

    @property
    def dims(self) -> dict[str, int]:
        """The dims of the DeviceMesh: name -> size."""
        return dict(self.rank_set.session.dims)

    @property
    def alive(self) -> bool:
        """Whether the mesh is ready to run cells and calls."""
        return self.rank_set.session.state == "ready"

    @property
    def runs(self) -> tuple[Run[Any], ...]:
        """The runs that have not ended, oldest first; after an attach, also the runs that were in
        flight then.
        """
        return self.rank_set.session.runs.all()

    @property
    def actors(self) -> dict[str, Actor]:
        """The actors of the mesh by name (`Ranks.spawn`)."""
        return {name: each.handle() for name, each in self.rank_set.session.actors.items()}

    def drop(self, actor: Actor) -> None:
        """Forget an actor, whose objects are removed from its ranks. Blocks.

        Args:
            actor: its handle.

        Raises:
            MeshUsageError: it is no actor of this mesh, or was dropped.
        """
        from .actors import drop, spawned_of

        drop(spawned_of(actor, self.rank_set))

    def redefine(self, actor: Actor, kind: type) -> None:
        """Give an actor's objects an edited class, on all ranks or on none; their state stays.
        Blocks.

        Args:
            actor: its handle, which has the methods of the new class from then on.
            kind: the class.

        Raises:
            MeshUsageError: it is no actor of this mesh, or was dropped.
            RankFailure: objects cannot have the class (Python's ``__class__`` assignment).
        """
        from .actors import redefine, spawned_of

        redefine(spawned_of(actor, self.rank_set), kind)

    @property
    def start_s(self) -> float:
        """How long the start or the last restart took, in seconds."""
        return self.rank_set.session.life.start_s

    @property
    def ready_ranks(self) -> Sequence[RankInfo]:
        """The ranks' processes and devices, as they were when the mesh became ready."""
        return self.rank_set.session.core.mesh.ranks

    def log_path(self, rank: int) -> Path:
        """Return the path of the log with all output of a rank; the mesh removes the log at its
        end.

        Raises:
            MeshUsageError: the mesh is on many hosts, and the logs are there (see `read_log`).
        """
        session = self.rank_set.session
        if session.has_hosts:
            raise MeshUsageError("the logs of a mesh on many hosts are there: mesh.read_log(rank)")
        return session.ticket.logs / f"rank{rank}.log"

    def reshape(self, dims: Mapping[str, int] | str) -> None:
        """Give each rank's DeviceMesh ``mesh`` other dims. Blocks; waits for the ranks' runs.

        Args:
            dims: name -> size, or ``dp=2,tp=4``; the product of the sizes is the number of ranks.

        Raises:
            MeshUsageError: the product differs from the number of ranks, or the mesh has no
                process group.
        """
        self._check_group()
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
        """Change the number of ranks of the mesh, between cells. Blocks.

        The highest ranks end, or new ranks are added, on the last host or on hosts that join. Ranks
        that stay keep their process and their variables, and get process groups and a ``mesh`` of
        the new size. Objects with groups of the old size (DTensors, models in DDP or FSDP) must be
        made again: `save` before and `load` after carry their values over.

        Args:
            num_ranks: new number of ranks; may be left out if `hosts` or `mesh` determines it.
            hosts: hosts that join a mesh on many hosts, such as ``"c:2"``.
            mesh: new dims of the DeviceMesh; needed if it has more than one.

        Returns:
            A report; its notes list variables that are bound to the old size.

        Raises:
            MeshUsageError: the size is not possible, a rank is busy or dead, or another mesh of
                this process uses the GPUs; nothing has changed.
            HostError: a host could not join, and nothing has changed; or new ranks could not be
                started, and the mesh has the new size without them (see `heal`).
        """
        from .resizing import plan_resize

        self._check_group()
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
        finally:  # also if the user has interrupted the wait
            self.rank_set = RankSet(session, range(session.num_ranks))
            self.ranks = self.rank_set.ranks
        if report.failure:
            raise HostError(report.failure)
        return report

    def save(self, *names: str, path: str | os.PathLike[str]) -> None:
        """Save variables of the ranks as one checkpoint (``torch.distributed.checkpoint``). Blocks.

        A checkpoint at `path` stays until the new one is complete on disk, and is then replaced
        atomically.

        Args:
            names: modules, optimizers, anything with a ``state_dict``, DTensors, tensors, plain
                values.
            path: a directory; created if it does not exist.

        Raises:
            MeshUsageError: a variable cannot be saved; nothing has been written.
            RankFailure: the checkpoint could not be written; the one at `path` is unchanged.
        """
        from .checkpoint import save

        save(self.rank_set, names, path)

    def report(self) -> Sequence[RankInfo]:
        """Return each rank's process, device and memory, as the agent measures them."""
        answer: HostReport | None = self.rank_set.session.ask_host()
        return answer.ranks if answer is not None else ()

    def why(self) -> str:
        """Describe why the mesh is stuck: operations that can never match, or else the ranks that
        wait, the ranks for which they wait, and the activity of those. Waits at most a second.
        """
        session = self.rank_set.session
        waits = explain_waits(self.states(), session.dead_ranks, len(self))
        return waits + session.core.mesh.describe_failed({*range(len(self))})

    def read_log(self, rank: int, num_bytes: int = LOG_BYTES) -> LogText | None:
        """Read the end of a rank's log, which has all output of the rank.

        Args:
            rank: the rank.
            num_bytes: maximum number of bytes to read.

        Returns:
            The text and the number of bytes before it; None if the mesh has ended.

        Raises:
            MeshUsageError: the mesh has no such rank.
        """
        if rank not in self.ranks:
            raise MeshUsageError(f"there is no rank {rank}: the mesh has 0-{len(self) - 1}")
        return self.rank_set.session.ask_log(rank, num_bytes)

    def heal(self, source: int | None = None, *, hosts: str | Iterable[str] = ()) -> HealReport:
        """Replace dead ranks by new ranks, and rebuild the process groups where needed. Blocks.

        Living ranks keep their processes and variables. After a failed cell without dead ranks the
        mesh heals by itself. Actors with ``on_death="restart"`` are made again on the new ranks.

        Args:
            source: a living rank whose variables are copied to the new ranks; None leaves the new
                ranks empty.
            hosts: new hosts, each in place of a lost host: ``"c:4"``, or ``"c"`` for any lost
                host's number of ranks. A lost host may be named itself: it is started again, and
                its old processes are given up.

        Returns:
            A report, with the variables that were copied and those that could not be.

        Raises:
            MeshUsageError: ranks are busy, `source` has nothing to copy, or there is no lost host
                that a host of `hosts` could replace.
            HostError: the mesh could not be healed; living ranks are unchanged.
        """
        if source is not None:
            self._check_source(source)
        supervisor = self.rank_set.session.supervisor
        with supervisor.around_heal() if supervisor is not None else contextlib.nullcontext():
            return self._heal(source, hosts)

    def _heal(self, source: int | None, hosts: str | Iterable[str]) -> HealReport:
        began_at = time.monotonic()
        report = self.rank_set.session.heal(hosts)
        if report.failure:
            busy = "must be idle" in report.failure
            raise MeshUsageError(report.failure) if busy else HostError(report.failure)
        empty, dead = self._empty_ranks(), self.rank_set.session.dead_ranks
        targets = sorted(empty - {source} - dead)
        if source is None or not targets:
            is_any_full = len(targets) < len(self.ranks)
            return msgspec.structs.replace(report, empty=tuple(targets) if is_any_full else ())
        from .replicas import copy_names

        others = [rank for rank in self.ranks if rank not in targets and rank not in dead]
        copied, refused = copy_names(
            self.rank_set.part((source,), is_single=True),
            self.rank_set.part(targets),
            self.rank_set.part(others),
        )
        took_s = time.monotonic() - began_at
        return msgspec.structs.replace(
            report, copied=copied, not_copied=refused, copied_to=tuple(targets), took_s=took_s
        )

    def _empty_ranks(self) -> set[int]:
        """Return the ranks that replaced dead ranks and have not run or received anything since."""
        return {info.rank for info in self.report() if info.predecessor_ending}

    def _check_group(self) -> None:
        if not self.rank_set.session.ticket.group:
            raise MeshUsageError(
                f"{self.name} has one rank and no process group: start a mesh without `--group "
                "off` (group=False) for more"
            )

    def _check_source(self, source: int) -> None:
        if source not in self.ranks:
            raise MeshUsageError(f"there is no rank {source}: the mesh has 0-{len(self) - 1}")
        if source in self.rank_set.session.dead_ranks | self._empty_ranks():
            raise MeshUsageError(f"rank {source} is dead or new, and holds nothing: choose another")

    def restart(
        self, timeout_s: float = 60.0, on_progress: Callable[[StartProgress], None] | None = None
    ) -> str:
        """Replace every rank by a new process, and lose the ranks' state. Blocks.

        The new ranks take over the environment variables and the working directory that have
        changed in this process since the start, the attach or the last restart.

        Args:
            timeout_s: how long the restart may take, in seconds.
            on_progress: called with the progress, on another thread.

        Returns:
            A sentence on the changes that the ranks take over; "" without changes.

        Raises:
            NoMeshError: the mesh has ended.
            HostError: the new ranks did not start; the mesh has ended.
        """
        return self.rank_set.session.restart(timeout_s, on_progress)

    def reload(self) -> tuple[str, ...]:
        """Reload, on all ranks, the user's modules whose files have changed since they were loaded;
        existing objects get the new code (IPython's autoreload). Blocks.

        A mesh on many hosts sends the files to the hosts first.

        Returns:
            The names of the modules that were reloaded on at least one rank.

        Raises:
            RankFailure: a module could not be reloaded; it keeps its old code.
        """
        if (code := self.rank_set.session.code) is not None:
            code.bring()
        names = self.pull(f"{_MODULES}.loaded.reload_changed()")
        return tuple(sorted({name for each in names.list for name in each}))

    def detach(self) -> None:
        """Disconnect from the mesh, which runs on until its lease ends; `attach` connects again.
        Blocks.

        Raises:
            MeshUsageError: the mesh has no lease.
            NoMeshError: the mesh has ended.
        """
        self.rank_set.session.detach()

    def stop(self) -> None:
        """End every process of the mesh, and wait for their exit. Further calls do nothing."""
        self.rank_set.session.stop()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __reduce__(self) -> Any:
        from ..wire.handles import Address

        return Address.within(self.rank_set.session.ticket).reduce()

    def __repr__(self) -> str:
        return f"<cellmesh {self}>"

    def __str__(self) -> str:
        return str(self.rank_set.session)
