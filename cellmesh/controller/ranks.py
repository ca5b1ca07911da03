"""The public `Ranks`: some ranks of a mesh, with methods that run code, move values and inspect.

``mesh[0]``, ``mesh[2:4]`` and ``mesh.at(tp=0)`` give parts of a mesh with the same methods. The
class is long, as it lists all operations for users; their implementations are in other modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeshUsageError, UnpicklableError
from ..wire.mesh_dims import ranks_at
from ..wire.status import RankState
from ..wire.values import PullNames
from ..wire.verbs import PostMortem, RunCall, RunCell
from .arguments import check_expression, is_async, read_argv, read_cell
from .output.calling_cell import current_sink
from .output.console import SilentSink, Sink
from .rank_set import RankSet, dump_call, pack_call
from .run import Run
from .status import show_stacks, stacks_of

if TYPE_CHECKING:
    from .actors import Actor
    from .inspect import Inspection
    from .metrics import Plot
    from .replicas import CheckReport, SyncSummary
    from .trace.history import History
    from .trace.profile import Profile
    from .values.transfer import Reduction
    from .weights import CopyRun


_STAYS_HERE = "a handle of ranks and stays in the notebook; on the ranks, `mesh` is the DeviceMesh"


class Ranks:
    """Some ranks of a mesh, with methods that run code on them, move values and inspect.

    Args:
        rank_set: the ranks, in the form that the feature modules use.
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
        try:
            positions = range(len(self))[index] if isinstance(index, slice) else list(index)
            chosen = tuple(dict.fromkeys(self.ranks[position] for position in positions))
        except (IndexError, TypeError):
            raise MeshUsageError(
                f"{index!r} chooses no ranks: index a mesh of {len(self)} with numbers "
                f"0-{len(self) - 1}, a slice or a list of them; `mesh.at(tp=0)` chooses by "
                "coordinate"
            ) from None
        if not chosen:
            raise MeshUsageError(f"{index!r} chooses none of {len(self)} ranks")
        return self._part(chosen)

    def at(self, **coordinate: int) -> Ranks:
        """Choose the ranks at a mesh coordinate.

        Args:
            coordinate: indices in some of the mesh's dims, as in ``mesh.at(tp=0)``.

        Returns:
            The ranks among these that are at the coordinate.

        Raises:
            MeshUsageError: the mesh has no such dim, the dim no such index, or none of these ranks
                is at the coordinate.
        """
        chosen = set(ranks_at(self.rank_set.session.dims, coordinate)) & set(self.ranks)
        if not chosen:
            raise MeshUsageError(f"none of {self.ranks} is at {coordinate}")
        return self._part(sorted(chosen))

    # ---- running code

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function on every rank, and return its values. Blocks.

        Args:
            function: a function that cloudpickle can pickle. Global names that are not pickled with
                it, or with its helpers, are looked up on the rank when it is called.
            args, kwargs: arguments of the function.

        Returns:
            `Results` (rank -> value), or the value itself on ``mesh[i]``.

        Raises:
            RankFailure: the function raised on at least one rank; the exception group has the
                original exceptions.
            UnpicklableError: the function or an argument cannot be pickled.
        """
        return self._call(function, args, kwargs, False).result()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Call a function on every rank as `run` does, and return a `Run` without waiting.

        What is sent later begins after the call's end. An ``async def`` function begins in order,
        and from its first ``await`` on waits beside what comes after; ``run.cancel()`` raises
        ``asyncio.CancelledError`` in it. `run` and `cell` wait for all of an asynchronous function.

        Returns:
            The run; call ``.result()``, ``await`` it, or iterate over ``(rank, value)``.
        """
        return self._call(function, args, kwargs, is_async(function))

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        interleaves: bool,
    ) -> Run[Any]:
        name = getattr(function, "__qualname__", type(function).__name__)
        if (call := pack_call(function, args, kwargs, interleaves)) is not None:
            num_bytes = len(call.function) + len(call.payload.stream)
            return self.rank_set.start(call, name, num_bytes=num_bytes)
        pickled, buffers, num_bytes = self.rank_set.lend(*dump_call(name, function, args, kwargs))
        verb = RunCall(0, pickled, interleaves=interleaves)
        return self.rank_set.start(verb, name, buffers, num_bytes=num_bytes)

    def spawn(
        self, kind: type, /, *args: Any, name: str = "", on_death: Any = "fail", **kwargs: Any
    ) -> Actor:
        """Make an object of a class on every rank, and return a handle, by which its methods are
        called there. Blocks.

        The object is a variable of the ranks, for cells. Its methods are executed on the main
        threads of the ranks, in the order of the calls; one that is ``async def`` waits beside
        other work::

            trainer = mesh.spawn(Trainer, lr=0.1)
            trainer.step(batch)             # rank -> value
            run = trainer.step.submit(batch)
            trainer[0].loss()               # the value of rank 0

        Args:
            kind: any class that cloudpickle can pickle.
            args, kwargs: arguments of the class.
            name: name of the actor and of the variable; "" for the class's in lower case. An actor
                of the same name and class is replaced.
            on_death: what happens once a rank has died: ``"fail"`` for nothing; ``"restart"`` to
                replace the rank and make the object again there; or a function, which is then
                called in this process, on another thread, with the handle and the new ranks, and
                may wait (``lambda actor, ranks: ...``). An actor is made again three times within a
                minute at most.

        Returns:
            The handle, whose attributes are the methods of the class (`Method`); `Mesh.actors` has
            it, too.

        Raises:
            RankFailure: the constructor raised on at least one rank; no rank has the object.
            MeshUsageError: the name is no name of a variable, or is taken.
            UnpicklableError: the class or an argument cannot be pickled.
        """
        from .actors import spawn

        return spawn(self.rank_set, kind, args, kwargs, name, on_death)

    def cell(self, source: str, argv: str | Iterable[str] | None = None) -> Any:
        """Run source as a notebook cell in the ranks' namespace. Blocks.

        Args:
            source: Python source, which may contain IPython magics.
            argv: arguments after the program's name in ``sys.argv`` while the cell runs:
                ``"--lr 0.1"``, or a list.

        Raises:
            RankFailure: the cell raised on at least one rank.
            SyntaxError: the source does not parse; no rank has run it.
        """
        self.submit_cell(source, argv=argv, in_order=True).result()

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
        in_order: bool = False,
    ) -> Run[None]:
        """Run source as `cell` does, and return a `Run` without waiting; a cell with ``await``
        waits beside what comes after, as in `submit`.

        Args:
            source: source of the cell.
            execution_count: number of ``In[n]`` in tracebacks; 0 to let the ranks count.
            quiet: whether to show only errors.
            timed: whether each rank measures its time (see `Run.timings`).
            argv: as in `cell`.
            sink: shows the output; None for the calling notebook cell or the console.
            has_tabs: whether a notebook shows a switch between ranks if their output differs.
            in_order: whether what comes after begins at the cell's end also if it has ``await``;
                always so with `timed` or `argv`.
        """
        session = self.rank_set.session
        count = execution_count or session.runs.count_cell()
        cell = read_cell(source, count)
        words = None if argv is None else read_argv(argv)
        sink = sink or current_sink(session.displays, has_tabs)
        waits = cell.awaits and not (in_order or timed or words is not None)
        verb = RunCell(
            0, cell.source, cell.transformed, cell.code, count, quiet, timed, words, waits
        )
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
        """Send values to the ranks and assign them to variables in the ranks' namespace. Blocks.

        Without `shard` and `placements`, each rank gets a whole copy of each value.

        Args:
            mapping: name -> value; needed for names such as ``shard`` that are arguments.
            shard: dim along which tensors and arrays are split among the ranks, as by
                ``torch.tensor_split``; tensors are moved to the rank's device.
            placements: placements of DTensors to be made on the ranks' mesh, one for each of its
                dims: ``[Shard(0), Replicate()]``, or the same as a text.
            more: name -> value.

        Raises:
            UnpicklableError: a value cannot be pickled; the message names it and its part.
            MeshUsageError: a value cannot be split, or does not fit into memory; nothing has been
                sent.
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
        """Evaluate an expression on every rank and return the values. Blocks.

        Args:
            expression: a name, or any Python expression.
            gather: whether to join the ranks' parts into one value: DTensors by their placements,
                plain tensors and arrays by rank.
            reduce: ``"mean"``, ``"sum"`` or ``"stack"`` of the ranks' values; containers are
                reduced element by element.
            dim: dim along which plain tensors and arrays are gathered.

        Returns:
            `Results`, or the value itself on ``mesh[i]`` and with `gather` or `reduce`. CUDA
            tensors are returned as CPU tensors.

        Raises:
            RankFailure: a rank could not evaluate the expression or pickle its value.
            MeshUsageError: the values do not fit together, or cannot be reduced.
        """
        check_expression(expression)
        if gather or reduce is not None:
            from .values.transfer import pull_one

            return pull_one(self.rank_set, expression, gather, reduce, dim)
        return self.rank_set.start(PullNames(0, expression)).result()

    def copy(self, expression: str, *, to: Ranks, into: str = "") -> CopyRun:
        """Copy tensors of these ranks into tensors of other ranks, in place; return without
        waiting.

        The ranks may be of another mesh, and their placements, world size and dtype may differ: the
        ranks send each other the parts that they need, not by way of the notebook. Either all
        target ranks copy, or none. Source and target ranks take part between other runs, in the
        order in which these arrive, so each sees old values or new ones and never a mix; wait for
        the copy before a run that changes the source.

        DTensors and parameters in DDP are sent by ranks in turn. Other tensors are taken from the
        lowest of these ranks that has them.

        Args:
            expression: a module, a tensor, or nested dicts and lists of them, as ranks would
                evaluate it.
            to: ranks with the target.
            into: the target, as its ranks would evaluate it; "" for `expression`.

        Returns:
            A run with the number of tensors that each target rank has copied. Its ``result()``
            raises `MeshUsageError`, and nothing was copied, if names, shapes or dtypes do not
            match.

        Raises:
            NoMeshError: one of the meshes has ended.
            RankDied: one of the ranks is dead.
        """
        from .weights import copy

        if not isinstance(to, Ranks):
            raise MeshUsageError(f"to={to!r} is no mesh: copy to ranks, as in to=generators")
        for each in (expression, into or expression):
            check_expression(each)
        return copy(self.rank_set, expression, to.rank_set, into or expression)

    def inspect(self, expression: str, *, grads: bool = False) -> Inspection:
        """Describe a value on every rank: shape, dtype, placements, statistics, and whether
        replicas are equal. Blocks.

        A path of names, attributes and constant indices is looked up without running code, by busy
        ranks from their control threads. Any other expression is evaluated once on each rank, if
        no rank is busy, and its value is kept there as long as the inspection lives.

        Args:
            expression: a tensor, a module, an optimizer or a container of them.
            grads: whether to describe the gradients in it, in place of its tensors.

        Returns:
            A Mapping rank -> `TensorSummary`; ranks without the value are in its `refusals`. A
            notebook displays it like ``%dist_inspect``.
        """
        from .inspect import inspect

        check_expression(expression)
        return inspect(self.rank_set, expression, grads=grads)

    def stacks(self, all_threads: bool = False) -> str:
        """Return the Python stacks of the ranks as text, equal stacks once; blocked ranks answer as
        well. Waits about a second for ranks that do not answer.

        Args:
            all_threads: whether to include all threads, not only the main thread.
        """
        return show_stacks(stacks_of(self.rank_set.session, self.ranks, all_threads))

    def check(self, expression: str = "") -> CheckReport:
        """Check that replicas are equal: parameters, buffers, optimizer and RNG state. Blocks.

        Runs no collective.

        Args:
            expression: the value to check; "" for all wrapped models, optimizers and generators.
        """
        from .replicas import check

        check_expression(expression.strip() or "None")
        return check(self.rank_set, expression)

    def sync(self, expression: str, source: int = 0) -> SyncSummary:
        """Copy tensors of models and optimizers from one rank to their replicas on other ranks, in
        place. Blocks.

        This is a collective, in which all ranks of the mesh take part.

        Args:
            expression: a model, an optimizer, or tensors.
            source: the rank whose values are copied.
        """
        from .replicas import sync

        check_expression(expression.strip() or "None")
        return sync(self.rank_set, expression, source)

    def load(self, *names: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Load a checkpoint into the ranks' objects, in place; it may have been saved on another
        number of ranks. Blocks.

        Args:
            names: names of saved variables to load; all saved variables if none are given.
            path: directory of a checkpoint that `Mesh.save` or ``torch.distributed.checkpoint`` has
                written.

        Returns:
            The names of the loaded variables.

        Raises:
            MeshUsageError: there is no checkpoint at `path`, or a name is not in it or does not
                match the saved variable; nothing has been loaded.
        """
        from .checkpoint import load

        return load(self.rank_set, names, path)

    def profile(self, source: str, trace: str | Path | None = None) -> Profile:
        """Run source as `cell` does, under torch.profiler on every rank. Blocks.

        Args:
            source: source of the cell.
            trace: path of a file to write, with one Chrome trace of all ranks.

        Returns:
            The profile: ``.operators``, ``.lateness``, ``.by_rank``.

        Raises:
            RankFailure: the cell raised on at least one rank; the exception's `profile` has the
                profile until then.
            RanksInterrupted: the cell was interrupted; the exception has a `profile` as well.
        """
        from .trace.profile import profile

        return profile(self, source, trace)

    def plot(self, *names: str, mean: bool = False) -> Plot:
        """Plot the numbers that these ranks log with `cellmesh.log`; a notebook updates the plot
        while they run.

        Args:
            names: names that were or will be logged: ``mesh.plot("loss")``.
            mean: whether to show the mean over ranks, with a band from minimum to maximum.

        Raises:
            MeshUsageError: no names are given, or one is not an identifier.
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
        """Return the timeline of the last cells: when each rank computed, was in a collective, and
        waited for which rank.

        Ranks always record it, for less than 1 % of a step's time, and answer also while they are
        busy.

        Args:
            num_cells: number of last cells; calls from Python count as cells.
            trace: path of a file to write, with a Chrome trace of the timeline.

        Returns:
            The history: ``.cells``, ``.operations``, ``.lateness()``, ``.describe()``.

        Raises:
            MeshUsageError: `num_cells` is less than 1, or `trace` is in no directory.
            NoMeshError: the mesh has ended.
            HostError: the trace could not be written.
        """
        from .trace.profile import remember

        return remember(self.rank_set, num_cells, trace)

    def debug(self) -> None:
        """Open the debugger at the place of these ranks' last exception. Blocks until the user
        leaves it.

        Raises:
            RankFailure: one of the ranks has had no exception.
        """
        self.rank_set.start(PostMortem(0), "the debugger").result()

    def states(self) -> Mapping[int, RankState]:
        """Return the current activity of each rank, reported by its control thread. Waits at most a
        second.

        Returns:
            rank -> state; without ranks that are dead or did not answer.
        """
        return self.rank_set.session.states(self.ranks)

    def interrupt(self) -> None:
        """Interrupt the current and the queued runs of these ranks; return without waiting."""
        self.rank_set.session.runs.interrupt(self.rank_set.session.runs.on(self.ranks))

    def __repr__(self) -> str:
        return f"<ranks {self.ranks} of {self.rank_set.session!r}>"

    def _part(self, ranks: Sequence[int], is_single: bool = False) -> Ranks:
        return Ranks(self.rank_set.part(ranks, is_single))

    def __reduce__(self) -> Any:
        raise UnpicklableError(f"this is {_STAYS_HERE}")


def seed_ranks(ranks: Ranks, seed: int, per_rank: bool = False) -> None:
    """Seed the random generators of Python, torch (on all devices) and, if imported, numpy. Blocks.

    Args:
        ranks: ranks to seed.
        seed: the seed.
        per_rank: whether to add its rank number to each rank's seed.
    """

    # A nested function is pickled by value, so that ranks do not import the controller.
    def seed_all(seed: int, per_rank: bool) -> None:
        import os
        import random
        import sys

        import torch

        number = seed + int(os.environ["RANK"]) if per_rank else seed
        random.seed(number)
        torch.manual_seed(number)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number % 2**32)

    ranks.run(seed_all, seed, per_rank)
