"""The public `Ranks`: some ranks of a mesh, with methods that run code, move values and inspect.

``mesh[0]``, ``mesh[2:4]`` and ``mesh.at(tp=0)`` give parts of a mesh with the same methods. A
little long, and one class all the same: it is the list of what users can do; what a method does is
in other modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeshUsageError
from ..wire.status import RankState
from ..wire.user_code import PostMortem, RunCall, RunCell
from ..wire.values import PullNames
from .arguments import check_expression, read_argv, read_cell
from .kernel import own_xmode
from .mesh_dims import ranks_at
from .output.calling_cell import current_sink
from .output.console import SilentSink, Sink
from .rank_set import RankSet, dump_call
from .run import Run
from .status import show_stacks

if TYPE_CHECKING:
    from .inspect import Inspection
    from .metrics import Plot
    from .replicas import CheckReport, SyncSummary
    from .trace.history import History
    from .trace.profile import Profile
    from .values.transfer import Reduction


_STAYS_HERE = (
    "the notebook's handle of the mesh and stays there; on the ranks, `mesh` is the DeviceMesh"
)


class Ranks:
    """Some ranks of a mesh, with methods that run code on them, move values and inspect.

    Args:
        rank_set: the ranks, as features see them.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self.rank_set = rank_set
        self.ranks = rank_set.ranks

    # ---- choosing ranks

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int | slice | Iterable[int]) -> Ranks:
        """Choose one rank (``mesh[0]``), a slice or a list of ranks, by position among these
        ranks.
        """
        if isinstance(index, int):
            try:
                return self._part((self.ranks[index],), is_single=True)
            except IndexError:
                raise IndexError(f"there is no rank {index}: the mesh has {len(self)}") from None
        if isinstance(index, str) or (
            isinstance(index, tuple) and index and isinstance(index[0], str)
        ):
            dim = index if isinstance(index, str) else index[0]
            raise MeshUsageError(
                f"mesh[{index!r}] chooses no ranks: it is a submesh, of which each rank has its "
                f"own in its cells. Here `mesh.at({dim}=0)` chooses ranks by their coordinate"
            )
        try:
            positions = range(len(self))[index] if isinstance(index, slice) else list(index)
            chosen = tuple(dict.fromkeys(self.ranks[position] for position in positions))
        except (IndexError, TypeError):
            raise MeshUsageError(
                f"{index!r} chooses no ranks: index a mesh of {len(self)} with numbers "
                f"0-{len(self) - 1}, a slice or a list of them"
            ) from None
        if not chosen:
            raise MeshUsageError(f"{index!r} chooses none of {len(self)} ranks")
        return self._part(chosen)

    def at(self, **coordinate: int) -> Ranks:
        """Choose the ranks at a mesh coordinate.

        Args:
            coordinate: indices in some of the mesh's dims, as in ``mesh.at(tp=0)``.

        Returns:
            Those of these ranks whose coordinate agrees.

        Raises:
            MeshUsageError: no such dim, no such index in it, or none of these ranks is there.
        """
        chosen = set(ranks_at(self.rank_set.session.dims, coordinate)) & set(self.ranks)
        if not chosen:
            raise MeshUsageError(f"none of {self.ranks} is at {coordinate}")
        return self._part(sorted(chosen))

    # ---- running things

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function on every rank, and wait.

        Args:
            function: anything that cloudpickle can pickle. Names that it and its helpers do not
                bring from the notebook are the rank's, as they are when it is called.
            args, kwargs: its arguments.

        Returns:
            `Results` (rank -> value), or the value itself on ``mesh[i]``.

        Raises:
            RankFailure: it raised on some ranks; the group holds the original exceptions.
            UnpicklableError: function or arguments cannot be pickled.
        """
        return self.submit(function, *args, **kwargs).result()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Call a function on every rank as `run` does, and return a `Run` without waiting.

        Returns:
            The run: ``.result()``, ``await run``, or iterate over ``(rank, value)``.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        pickled, buffers, num_bytes = self.rank_set.lend(*dump_call(name, function, args, kwargs))
        verb = RunCall(0, pickled, own_xmode())
        return self.rank_set.start(verb, name, buffers, num_bytes=num_bytes)

    def cell(self, source: str, argv: str | Iterable[str] | None = None) -> Any:
        """Run source in the ranks' namespace, as a notebook's cell, and wait.

        Args:
            source: Python, with IPython's magics if wanted.
            argv: what follows the program's name in ``sys.argv`` while it runs: ``"--lr 0.1"``, or
                a list.

        Raises:
            RankFailure: it raised on some ranks.
            SyntaxError: it does not parse; no rank has run anything.
        """
        self.submit_cell(source, argv=argv).result()

    def submit_cell(
        self,
        source: str,
        *,
        execution_count: int = 0,
        quiet: bool = False,
        timed: bool = False,
        argv: str | Iterable[str] | None = None,
        sink: Sink | None = None,
        has_tabs: bool = False,
    ) -> Run[None]:
        """Run source as `cell` does, and return a `Run` without waiting.

        Args:
            source: the cell.
            execution_count: what ``In[n]`` shows in tracebacks; 0 counts by itself.
            quiet: show nothing but errors.
            timed: have each rank tell how long it took (`Run.timings`).
            argv: as of `cell`.
            sink: where output goes; None for the calling notebook cell or the console.
            has_tabs: in a notebook, let people switch between ranks that showed different things.
        """
        cell = read_cell(source, execution_count)
        words = None if argv is None else read_argv(argv)
        session = self.rank_set.session
        count = execution_count or session.runs.count_cell()
        sink = sink or current_sink(session.displays, has_tabs)
        code = cell.source, cell.transformed, cell.is_async
        verb = RunCell(0, *code, count, quiet, timed, own_xmode(), words)
        sink = SilentSink(sink) if quiet else sink
        return self.rank_set.start(verb, f"cell {count}", num_bytes=len(cell.source), sink=sink)

    # ---- values

    def push(
        self,
        mapping: Mapping[str, Any] | None = None,
        /,
        *,
        shard: int | None = None,
        placements: Sequence[Any] | str | None = None,
        **more: Any,
    ) -> None:
        """Send values to the ranks, where they are bound to names of the namespace, and wait.

        Args:
            mapping: name -> value; for names such as ``shard`` that the arguments below have.
            shard: give each rank a part of its own: split tensors and arrays along this dim, as
                ``torch.tensor_split`` does, tensors on the rank's device.
            placements: make DTensors on the ranks' mesh: ``[Shard(0), Replicate()]``, one for each
                of its dims, or that as a text.
            more: name -> value. Without the two above, each rank has a whole value of its own.

        Raises:
            UnpicklableError: a value cannot be pickled; says which, and which part of it.
            MeshUsageError: a value cannot be split so, or is larger than memory. Nothing has been
                sent then.
        """
        from .values.transfer import push

        names = {**(mapping or {}), **more}
        for name, value in names.items():
            if isinstance(value, Ranks):
                raise MeshUsageError(f"{name!r} is {_STAYS_HERE}")
        push(self.rank_set, names, shard, placements)

    def pull(
        self,
        expression: str,
        *,
        gather: bool = False,
        reduce: Reduction | None = None,
        dim: int = 0,
    ) -> Any:
        """Evaluate an expression on every rank and bring the values here. Blocks.

        Args:
            expression: a name, or any Python expression.
            gather: put the ranks' parts together to one: DTensors by their placements, plain
                tensors and arrays by rank.
            reduce: ``"mean"``, ``"sum"`` or ``"stack"`` of the ranks' values; of nests, part by
                part.
            dim: along which plain parts are gathered.

        Returns:
            `Results`, or the value itself on ``mesh[i]`` and with `gather` or `reduce`. CUDA
            tensors come as CPU tensors.

        Raises:
            RankFailure: a rank could not evaluate or pickle it.
            MeshUsageError: the values make no whole, or cannot be reduced.
        """
        check_expression(expression)
        if gather or reduce is not None:
            from .values.transfer import pull_one

            return pull_one(self.rank_set, expression, gather, reduce, dim)
        return self.rank_set.start(PullNames(0, expression)).result()

    def inspect(self, expression: str, *, grads: bool = False) -> Inspection:
        """Describe a value on every rank: shape, dtype, placements, statistics, whether replicas
        are equal.

        A path of names, attributes and constant indices is followed, and runs no code; ranks that
        are busy answer it from their control threads. Any other expression is evaluated once on
        each rank, if none of them is busy, and its value kept there as long as the inspection
        lives. Blocks.

        Args:
            expression: a tensor, a module, an optimizer or any nest of them.
            grads: describe the gradients in it, in place of its tensors.

        Returns:
            A Mapping rank -> `TensorSummary`; ranks that have no such value are in its
            `refusals`. In a notebook it shows itself as ``%dist_inspect`` does.
        """
        from .inspect import inspect

        check_expression(expression)
        return inspect(self.rank_set, expression, grads=grads)

    def stacks(self, all_threads: bool = False) -> str:
        """Show each rank's Python stack, equal stacks once; ranks answer while they are blocked,
        too. Waits about a second for ranks that do not answer.

        Args:
            all_threads: all threads, not only the main one.
        """
        return show_stacks(self.rank_set.session, self.ranks, all_threads)

    def check(self, expression: str = "") -> CheckReport:
        """Check that replicas are equal: parameters, buffers, optimizer and RNG state.

        Runs no collective. Blocks.

        Args:
            expression: what to check; "" for all wrapped models, optimizers and generators.
        """
        from .replicas import check

        return check(self.rank_set, expression)

    def sync(self, expression: str, source: int = 0) -> SyncSummary:
        """Make replicas equal again, in place. A collective: all ranks take part. Blocks.

        Args:
            expression: a model, an optimizer, tensors.
            source: the rank whose values are right.
        """
        from .replicas import sync

        return sync(self.rank_set, expression, source)

    def load(self, *names: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Load a checkpoint into the ranks' objects, in place, on whatever number of ranks it was
        saved. Blocks.

        Args:
            names: which of those that were saved; none for all.
            path: of the checkpoint, as `Mesh.save` or ``torch.distributed.checkpoint`` has written
                it.

        Returns:
            The names loaded.

        Raises:
            MeshUsageError: there is no checkpoint, or a name is not there or not what was saved.
                Nothing has been loaded then.
        """
        from .checkpoint import load

        return load(self.rank_set, names, path)

    def profile(self, source: str, trace: str | Path | None = None) -> Profile:
        """Run source as `cell` does, under torch.profiler on every rank, and wait.

        Args:
            source: the cell.
            trace: a file for one Chrome trace of all ranks.

        Returns:
            Where time went: ``.operators``, ``.lateness``, ``.by_rank``.

        Raises:
            RankFailure: the cell raised on some ranks; its `profile` has what ran until then.
            RanksInterrupted: it was interrupted; likewise.
        """
        from .trace.profile import profile

        return profile(self, source, trace)

    def plot(self, *names: str, mean: bool = False) -> Plot:
        """Plot what these ranks report with `cellmesh.log`; a notebook updates the plot while they
        run.

        Args:
            names: what was, or will be, logged: ``mesh.plot("loss")``.
            mean: the ranks' mean, and a band from the least to the most.

        Raises:
            MeshUsageError: there are no names, or one is none.
        """
        from .metrics import plot  # rarely used

        return plot(
            self.rank_set.session.metrics,
            names,
            self.ranks,
            mean,
            self.rank_set.session.shown,
        )

    def timeline(self, num_cells: int = 5, trace: str | Path | None = None) -> History:
        """Show when these ranks computed, were in collectives, and waited for which rank in the
        last cells.

        Ranks note that always, at a cost below a hundredth of a step. Answered also while they are
        busy.

        Args:
            num_cells: how many of the last cells; calls from Python count as cells.
            trace: a file for a Chrome trace of it.

        Returns:
            The history: ``.cells``, ``.operations``, ``.lateness()``, ``.describe()``.

        Raises:
            MeshUsageError: of no cells.
            NoMeshError: the mesh has ended.
            HostError: the trace could not be written.
        """
        from .trace.profile import remember

        return remember(self.rank_set, num_cells, trace)

    def debug(self) -> None:
        """Open the debugger where these ranks' last exception was raised. Blocks until it is left.

        Raises:
            RankFailure: there was no exception on one of them.
        """
        self.rank_set.start(PostMortem(0), "the debugger").result()

    def states(self) -> Mapping[int, RankState]:
        """Ask each rank's control thread what the rank is doing now. Waits at most a second.

        Returns:
            rank -> state; ranks that are dead or did not answer are missing.
        """
        return self.rank_set.session.states(self.ranks)

    def interrupt(self) -> None:
        """Interrupt the runs of these ranks, also those that are queued. Does not wait."""
        self.rank_set.session.runs.interrupt(self.rank_set.session.runs.on(self.ranks))

    def __repr__(self) -> str:
        return f"<ranks {self.ranks} of {self.rank_set.session!r}>"

    def _part(self, ranks: Sequence[int], is_single: bool = False) -> Ranks:
        return Ranks(self.rank_set.part(ranks, is_single))

    def __reduce__(self) -> Any:
        raise TypeError(f"this is {_STAYS_HERE}")


def seed_ranks(ranks: Ranks, seed: int, per_rank: bool = False) -> list[str]:
    """Seed the generators of Python, numpy (where it is imported) and torch, on all devices.
    Blocks.

    Args:
        ranks: whose.
        seed: of all of them.
        per_rank: give each its rank more.

    Returns:
        Which were seeded, as people call them.
    """

    # A nested function travels as what it is: ranks import nothing of the controller's.
    def seed_all(seed: int, per_rank: bool) -> list[str]:
        import os
        import random
        import sys

        import torch

        number = seed + int(os.environ["RANK"]) if per_rank else seed
        random.seed(number)
        seeded = ["random"]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number % 2**32)
            seeded.append("numpy")
        torch.manual_seed(number)
        seeded.append("torch")
        return seeded

    results = ranks.submit(seed_all, seed, per_rank).result()
    seeded: list[str] = results if isinstance(results, list) else max(results.values(), key=len)
    return seeded
