"""Copies tensors from ranks of one mesh to ranks of another: all ranks describe theirs, `plan`
decides who gives what, source ranks write their pieces, target ranks hold these, and only when all
of them do, they copy. The notebook reads no tensor.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import CellmeshError, MeshUsageError, RankFailure, RanksInterrupted
from ..stdlib import time
from ..wire.codec import Parcel
from ..wire.messages import Failed, Request
from ..wire.segments import SegmentFrame, new_loan, span
from ..wire.weights import (
    DescribeTensors,
    GiveTensors,
    HoldTensors,
    Piece,
    Ranges,
    Share,
    TakeTensors,
    TensorPart,
    shared_volume,
    volume,
)
from .output.calling_cell import current_sink
from .output.console import Unremarked
from .output.printer import Printer
from .rank_set import RankSet
from .run import Run, WorkItem

_MAX_NAMED = 3
# How long an interrupted copy waits for targets that copy already, in seconds.
_TAKE_S = 1.0

_NUMBER = re.compile(r"b?(float|complex|int|uint)(\d+)")

Side = Mapping[int, Sequence[TensorPart]]  # rank -> its parts


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """The pieces that each source rank gives.

    Attributes:
        shares: the pieces, by their names at the source.
        holds: the same pieces, by source rank, by their names at the target; a tied tensor has
            several names.
        readers: the target ranks that need some of the pieces, by source rank.
    """

    shares: tuple[Share, ...]
    holds: Mapping[int, tuple[Piece, ...]]
    readers: Mapping[int, tuple[int, ...]]


def plan(sources: Side, targets: Side, names: tuple[str, str], is_same_mesh: bool) -> Plan:
    """Decide which source rank gives which of its parts. Pure.

    Args:
        sources, targets: the ranks' parts.
        names: the expressions of the source and of the target.
        is_same_mesh: whether sources and targets are ranks of one mesh.

    Raises:
        MeshUsageError: the tensors do not match, or cannot be copied.
    """
    given, problems = _by_name(sources, names[0])
    taken, more = _by_name(targets, names[1])
    problems += more
    if not problems:
        matched, problems = _match(given, taken, names)
    if not problems:
        problems = [
            text
            for there, here in matched.items()
            for text in _misfits(given[here], taken[there], _label(names[1], there), is_same_mesh)
        ]
    writers = _Writers()
    if not problems:
        for there, here in matched.items():
            wanted = {p.ranges for p in taken[there].values() if p.ranges is not None}
            label = _label(names[0], here)
            problems += writers.choose(here, there, given[here], wanted, label)
        problems = problems or writers.ties(taken, names[1])
    if problems:
        left = len(problems) - _MAX_NAMED
        rest = f"; and {left} more" if left > 0 else ""
        raise MeshUsageError(f"nothing was copied: {'; '.join(problems[:_MAX_NAMED])}{rest}")
    return writers.plan(taken)


def _label(expression: str, name: str) -> str:
    return repr(f"{expression}.{name}" if name else expression)


def _by_name(side: Side, expression: str) -> tuple[dict[str, dict[int, TensorPart]], list[str]]:
    """Return the parts of each tensor by rank, and problems with them."""
    found: dict[str, dict[int, TensorPart]] = {}
    problems: dict[str, str] = {}
    for rank, parts in sorted(side.items()):
        for part in parts:
            label, others = _label(expression, part.name), found.setdefault(part.name, {})
            first = next(iter(others.values()), part)
            if part.problem:
                problems[part.name] = f"{label} {part.problem}"
            elif (first.shape, first.dtype) != (part.shape, part.dtype) and not first.problem:
                problems[part.name] = (
                    f"{label} is {_kind(first)} on rank {min(others)}, and {_kind(part)} on rank "
                    f"{rank}"
                )
            others[rank] = part
    if not found:
        problems[""] = f"{expression!r} has no tensors"
    return found, list(problems.values())


def _kind(part: TensorPart) -> str:
    return f"{part.shape} {part.dtype}"


def _match(
    given: Mapping[str, Any], taken: Mapping[str, Any], names: tuple[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the name at the source of each tensor of the target, and the names without a
    counterpart.
    """
    ours, theirs = {name: name for name in taken}, {name: name for name in given}
    if ours.keys() != theirs.keys():
        ours, theirs = _stripped(ours, "_orig_mod."), _stripped(theirs, "_orig_mod.")
    if ours.keys() != theirs.keys():  # one of them may be in DDP
        bare = _stripped(ours, "module."), _stripped(theirs, "module.")
        ours, theirs = bare if bare[0].keys() == bare[1].keys() else (ours, theirs)
    missing = [f"{_label(names[0], ours[n])} is missing" for n in ours if n not in theirs]
    unexpected = [
        f"{_label(names[0], theirs[n])} is unexpected: {names[1]!r} has none"
        for n in theirs
        if n not in ours
    ]
    return {ours[n]: theirs[n] for n in ours if n in theirs}, missing + unexpected


def _stripped(names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Remove what a wrapper (torch.compile in any module, DDP at the top) adds to names."""
    found = {}
    for name, original in names.items():
        if prefix == "module.":
            name = name.removeprefix(prefix)
        else:
            name = ".".join(each for each in name.split(".") if each != prefix[:-1])
        found[name] = original
    return found if len(found) == len(names) else dict(names)


def _misfits(
    given: Mapping[int, TensorPart], taken: Mapping[int, TensorPart], label: str, is_same: bool
) -> Iterator[str]:
    ours, theirs = next(iter(taken.values())), next(iter(given.values()))
    if ours.shape != theirs.shape:
        yield f"{label} is {ours.shape}, and {theirs.shape} at the source"
    elif not is_cast(theirs.dtype, ours.dtype):
        yield (
            f"{label} is {ours.dtype}, and {theirs.dtype} at the source, which is not converted "
            "to that: convert one of them"
        )
    elif is_same and any(
        part.memory and part.memory == given[rank].memory
        for rank, part in taken.items()
        if rank in given
    ):
        yield f"{label} is the same tensor at the source: copy into another one, or to other ranks"


def is_cast(source: str, target: str) -> bool:
    """Return whether elements are converted from one dtype to another: between floats, between
    complex numbers, and from integers to those that can hold them.
    """
    if source == target:
        return True
    kinds = [_NUMBER.match(dtype) for dtype in (source, target)]
    if kinds[0] is None or kinds[1] is None:
        return False
    (kind, bits), (other, room) = (match.groups() for match in kinds if match is not None)
    if "int" in kind and "int" in other:
        return int(room) > int(bits) and (other == "int" or kind == "uint")
    return kind == other


class _Writers:
    """The source ranks chosen to write pieces, and the bytes that each writes."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # rank -> bytes so far
        self._written: dict[tuple[Any, ...], int] = {}  # tied parts -> offset
        self._gives: dict[int, list[Piece]] = {}
        self._holds: dict[int, list[Piece]] = {}
        self._places: dict[str, frozenset[tuple[int, int]]] = {}  # target's name -> its pieces

    def choose(
        self,
        here: str,
        there: str,
        given: Mapping[int, TensorPart],
        wanted: set[Ranges],
        label: str,
    ) -> list[str]:
        """Choose one rank for each part of a tensor that targets want, the one with the fewest
        bytes so far of those with replicas; return what is missing.
        """
        chosen: dict[Ranges, list[int]] = {}
        held = {r: p.ranges for r, p in given.items() if p.ranges is not None and volume(p.ranges)}
        for rank, ranges in sorted(held.items(), key=lambda item: (-volume(item[1]), item[0])):
            if ranges in chosen:
                if given[rank].is_replica:
                    chosen[ranges].append(rank)
            elif any(shared_volume(ranges, each) for each in wanted) and not any(
                shared_volume(ranges, other) == volume(ranges)
                for other in chosen
                if volume(other) > volume(ranges)
            ):
                chosen[ranges] = [rank]
        for each in wanted:
            num = sum(shared_volume(ranges, each) for ranges in chosen)
            if num != volume(each):
                return [
                    f"{volume(each) - num} elements of {label} are on ranks from which nothing is "
                    "copied: copy from the whole mesh"
                ]
        places = set()
        for ranges, ranks in chosen.items():
            places.add(self._write(here, there, given, ranges, ranks))
        self._places[there] = frozenset(places)
        return []

    def _write(
        self,
        here: str,
        there: str,
        given: Mapping[int, TensorPart],
        ranges: Ranges,
        ranks: Sequence[int],
    ) -> tuple[int, int]:
        part = given[ranks[0]]
        keys = {rank: (rank, given[rank].memory, part.shape, part.dtype, ranges) for rank in ranks}
        rank = next((r for r in ranks if keys[r] in self._written), None)
        if rank is None:
            rank = min(ranks, key=lambda r: self._sizes.get(r, 0))
            at = self._written[keys[rank]] = self._sizes.get(rank, 0)
            self._sizes[rank] = at + span([volume(ranges) * part.item_bytes])
            self._gives.setdefault(rank, []).append(Piece(here, part.dtype, ranges, at))
        at = self._written[keys[rank]]
        self._holds.setdefault(rank, []).append(Piece(there, part.dtype, ranges, at))
        return rank, at

    def ties(self, taken: Mapping[str, Mapping[int, TensorPart]], expression: str) -> list[str]:
        """Return the tensors of the target that are one, but not at the source."""
        tied: dict[tuple[Any, ...], str] = {}
        problems = dict[str, str]()
        for name, parts in taken.items():
            for rank, part in parts.items():
                first = tied.setdefault((rank, part.memory, part.ranges), name)
                if part.memory and self._places[first] != self._places[name]:
                    problems[name] = (
                        f"{_label(expression, name)} and {_label(expression, first)} are one "
                        "tensor, but two at the source: tie them there, too"
                    )
        return list(problems.values())

    def plan(self, taken: Mapping[str, Mapping[int, TensorPart]]) -> Plan:
        """Return the plan, with the ranks that read each source rank's pieces."""
        readers: dict[int, set[int]] = {rank: set() for rank in self._holds}
        for source, pieces in self._holds.items():
            for piece in pieces:
                for rank, part in taken[piece.name].items():
                    is_new = rank not in readers[source] and part.ranges is not None
                    if is_new and shared_volume(piece.ranges, part.ranges or ()):
                        readers[source].add(rank)
        return Plan(
            tuple(
                Share(rank, tuple(pieces), self._sizes[rank])
                for rank, pieces in sorted(self._gives.items())
            ),
            {rank: tuple(pieces) for rank, pieces in self._holds.items()},
            {rank: tuple(sorted(ranks)) for rank, ranks in readers.items()},
        )


@functools.lru_cache(8)
def _plan_again(
    sources: tuple[tuple[int, bytes], ...],
    targets: tuple[tuple[int, bytes], ...],
    names: tuple[str, str],
    is_same_mesh: bool,
) -> Plan:
    """Plan a copy; a copy of the same tensors as before has the plan of before."""
    decode = msgspec.msgpack.Decoder(list[TensorPart]).decode
    sides = [{rank: decode(data) for rank, data in side} for side in (sources, targets)]
    return plan(sides[0], sides[1], names, is_same_mesh)


# ---------------------------------------------------------------- the copy


class CopyRun(Run[int]):
    """A copy of tensors between meshes, in flight or ended; used like any `Run`.

    Attributes:
        error: why nothing was copied; None if it was, or may still be.
    """

    error: BaseException | None = None

    def raise_failure(self) -> None:
        """Raise the reason for which nothing was copied, or the failures of target ranks."""
        if self.error is not None:
            raise self.error
        super().raise_failure()


def copy(sources: RankSet, expression: str, targets: RankSet, into: str) -> CopyRun:
    """Copy the tensors of an expression to other ranks, without waiting; see `Ranks.copy`."""
    copying = _Copying(sources, expression, targets, into)
    copying.start()
    return copying.run


class _Copying:
    """One copy between meshes, which a thread carries out; also the `RunControl` of its run."""

    def __init__(self, sources: RankSet, expression: str, targets: RankSet, into: str) -> None:
        # `Results` also of one rank
        self._sources, self._targets = (each.part(each.ranks) for each in (sources, targets))
        self._names = expression, into
        self._number = new_loan()
        self._title = f"copy of {expression!r}"
        self._sink = Unremarked(current_sink(sources.session.displays))
        request = TakeTensors(self._number, into)
        item = WorkItem(
            Request(0, request), TakeTensors, targets.ranks, title=self._title,
            is_single=targets.is_single,
        )  # fmt: skip
        self.run = CopyRun(-1, item, Printer(targets.ranks, self._sink, False), self)
        self._runs: dict[Run[Any], str] = {}  # run -> name of its mesh
        self._ended: queue.SimpleQueue[Run[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = self._takes = False

    def start(self) -> None:
        """Ask all ranks for their tensors, and start the thread.

        Raises:
            NoMeshError: one of the meshes has ended.
            RankDied: one of the ranks is dead.
        """
        for ranks in (self._sources, self._targets):
            ranks.session.runs.check_usable(ranks.ranks)
        self._targets.session.copies.add(self._number)
        try:
            self._describing = [self._describe(each) for each in (False, True)]
        except BaseException:
            self._end()
            raise
        threading.Thread(target=self._act, name="cellmesh-copy", daemon=True).start()

    def _describe(self, is_target: bool) -> Run[Any]:
        ranks = self._targets if is_target else self._sources
        copies = tuple(ranks.session.copies)
        return self._send(ranks, DescribeTensors(self._names[is_target], is_target, copies))

    def _send(self, ranks: RankSet, request: Any, buffers: Sequence[Any] = ()) -> Run[Any]:
        run = ranks.start(request, self._title, buffers, sink=self._sink)
        self._runs[run] = ranks.session.name
        run.on_end(functools.partial(self._ended.put, run))
        return run

    # ---- on the thread

    def _act(self) -> None:
        outcomes: Mapping[int, Parcel[Any]]
        try:
            outcomes = self._copy()
        except BaseException as error:
            self.run.error = error.with_traceback(None)  # which would keep segments open
            text = "".join(str(error).splitlines(keepends=True)[:1])
            failed: Any = Failed(-1, type(error).__name__, text, "", 0)
            outcomes = dict.fromkeys(self._targets.ranks, Parcel(failed))
        finally:
            self._end()
        now = time.monotonic()
        for rank, outcome in outcomes.items():
            self.run.settle((rank,), outcome, now)
        self.run.finish(now)

    def _end(self) -> None:
        self._targets.session.copies.discard(self._number)
        runs, self._runs = [*self._runs], {}  # so that no segment stays open
        if self._takes:
            return
        for run in runs:
            run.cancel()
        if len(runs) > 2:  # some ranks may hold pieces
            with contextlib.suppress(CellmeshError):
                living = self._targets.part(self._targets.living())
                drop = DescribeTensors("()", True, tuple(living.session.copies))
                living.start(drop, self._title, sink=self._sink)

    def _copy(self) -> Mapping[int, Parcel[Any]]:
        self._wait(*self._describing)
        sides = (tuple(sorted(run.result().items())) for run in self._describing)
        is_same_mesh = self._sources.session is self._targets.session
        decided = _plan_again(*sides, self._names, is_same_mesh)
        givers, loans = self._sources.part([share.rank for share in decided.shares]), list[int]()
        if givers.ranks:
            ended = tuple(givers.session.ended_loans)
            give = GiveTensors(self._names[0], decided.shares, ended)
            giving = self._send(givers, give)
            self._wait(giving)
            holding = []
            for rank in givers.ranks:
                pickled, buffers = giving.payload_of(rank)
                loans += [each.ref.loan for each in buffers if isinstance(each, SegmentFrame)]
                hold = HoldTensors(self._number, decided.holds[rank], pickled)
                readers = self._targets.part(decided.readers[rank])
                holding.append(self._send(readers, hold, buffers))
            self._wait(*holding)
        with self._lock:
            self._takes = not self._is_stopped
        if not self._takes:
            raise self._interrupted()
        taking = self._send(self._targets, TakeTensors(self._number, self._names[1]))
        try:
            self._wait(taking)
            givers.session.ended_loans.extend(loans)
        except RankFailure:  # each rank's outcome is reported
            pass
        return {rank: Parcel(verb) for rank, verb in taking.outcomes().items()}

    def _wait(self, *runs: Run[Any]) -> None:
        """Wait for the ends of runs, and raise the first failure."""
        for _ in runs:
            run = self._ended.get()
            if run is None and self._takes:
                with contextlib.suppress(queue.Empty):
                    run = self._ended.get(timeout=_TAKE_S)
                if run is None:
                    raise RanksInterrupted(
                        f"the {self._title} goes on: all is written, and targets that are busy "
                        "take it after that"
                    )
            if run is None:
                raise self._interrupted()
            try:
                run.raise_failure()
            except RankFailure as failure:
                failure.add_note(f"on the ranks of {self._runs[run]}, in the {self._title}")
                raise

    def _interrupted(self) -> RanksInterrupted:
        return RanksInterrupted(f"the {self._title} was interrupted: nothing was copied")

    # ---- for its run

    def check_may_wait(self) -> None:
        """Raise an error if the caller must not wait; see `RunControl`."""
        for ranks in (self._sources, self._targets):
            ranks.session.runs.check_may_wait()

    def interrupt_run(self, number: int, ranks: Sequence[int]) -> None:
        """End the copy, unless targets already copy."""
        with self._lock:
            self._is_stopped = True
            self._ended.put(None)

    def begin_wait(self, number: int, ranks: Sequence[int]) -> None:
        """Do nothing, as other threads may submit runs that the copy waits for."""

    def reply(self, requests: Mapping[int, int], text: str, is_end: bool = False) -> None:
        """Do nothing, as no rank asks for input."""
