"""Finds the models of a rank that a failed training step has left half done, and resets them.

A step that stops half way leaves DDP's reducer waiting for gradients, FSDP's parameters gathered,
or a pipeline's microbatches in flight; the next step on the same objects would raise or, worse,
wait for operations that other ranks do not begin. The models are found through the garbage
collector, as no registry lists them.

Ranks differ in the models that they find half done: the rank that raised often has none, while the
others stopped in the middle of a backward pass. As all ranks must continue alike, they exchange the
signatures of the models found, which are the same on all ranks, and `Survey.reset` resets the
models that any rank has found.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from .data_parallel import Ddp, Fsdp1, Fsdp2
from .data_parallel import note_reducers as note_reducers
from .kinds import BackwardPasses as BackwardPasses
from .kinds import HealCallbacks as HealCallbacks
from .kinds import Kind, OwnCode, Pipeline, Scaler, Zero
from .kinds import Progress as Progress


def look_after_failure() -> bool:
    """Examine this rank's models after a failed cell; return whether the cell may have left any
    half done, or in another state than on other ranks.
    """
    survey = Survey()
    survey.arm()
    return survey.may_differ() or bool(survey.half_done)


class Survey:
    """Finds the live models of this process, and the signatures of those that a failed training
    step has left half done.

    Args:
        half_done: signatures that an earlier survey has found, which are included.
    """

    def __init__(self, half_done: Collection[str] = ()) -> None:
        self._found: list[tuple[str, Kind, Any]] = []
        dirty = set(half_done)
        progress: dict[str, list[tuple[int, ...]]] = {}
        for kind, one in _all():
            try:
                signature, is_dirty = _signature(kind, one), kind.is_dirty(one)
                progress_of_one = kind.progress(one)
            except KeyboardInterrupt:
                raise
            except BaseException:
                # It is half constructed, or user code in it raises: a step on it would fail, too.
                continue
            self._found.append((signature, kind, one))
            progress.setdefault(signature, []).append(progress_of_one)
            if is_dirty:
                dirty.add(signature)
        # Signatures of models that an interrupted step has left half done.
        self.half_done = tuple(sorted(dirty))
        # Progress of models, by signature: counters and flags that have to be equal on all ranks.
        self.progress: dict[str, Progress] = {
            signature: tuple(sorted(each)) for signature, each in progress.items() if any(each)
        }

    def arm(self) -> None:
        """Make each model drop the failed step's state at the beginning of its next step
        (`Kind.arm`).
        """
        for signature, kind, one in self._found:
            if signature not in self.half_done:
                kind.arm(one)

    def may_differ(self) -> bool:
        """Return whether a model was used since the last failure in such a way that ranks may
        differ in its state (`Kind.may_differ`).
        """
        answers = {kind.may_differ(one) for _, kind, one in self._found}  # asks each, as it counts
        return True in answers

    def reset(
        self, half_done: Collection[str], progress: Mapping[str, Sequence[Progress]] | None = None
    ) -> tuple[str, ...]:
        """Reset every model to its state between two steps; return notes for the user.

        Args:
            half_done: signatures of the models that any rank has found half done.
            progress: progress of each rank's models, for signatures in which ranks differ.
        """
        notes: dict[str, None] = {}
        dropped = set()
        for signature, kind, one in self._found:
            try:
                if progress and signature in progress:
                    kind.align(one, progress[signature])
                notes.update(dict.fromkeys(kind.reset(one, signature in half_done)))
            except Exception as error:
                # This torch has other attributes, or user code in the model has raised.
                name = type(error).__name__
                notes[f"{kind.label} could not be reset, construct it again ({name})"] = None
                continue
            if signature in half_done and kind.drops_grads:
                dropped.add(kind.label)
        if dropped:
            text = f"gradients of the unfinished step are dropped ({', '.join(sorted(dropped))})"
            notes = {text: None} | notes
        return tuple(notes)


def _all() -> list[tuple[Kind, Any]]:
    """Return the live objects that a `Kind` handles (DDP and FSDP models, pipelines, ...), found in
    one pass over the garbage collector's objects, without imports.
    """
    kinds: dict[int, Kind] = {}  # by id of the class, as a metaclass's hash may raise
    for kind in (Ddp(), Fsdp2(), Fsdp1(), Pipeline(), Zero(), Scaler(), OwnCode()):
        module, name = kind.where
        if (root := getattr(sys.modules.get(module), name, None)) is not None:
            kinds.update((id(each), kind) for each in _with_subclasses(root))
    if not kinds:
        return []
    # Compare by `type`: ``isinstance`` would run code of the objects, and some proxies have side
    # effects.
    found = [
        (kinds[id(type(thing))], thing) for thing in gc.get_objects() if id(type(thing)) in kinds
    ]
    return [(kind, thing) for kind, thing in found if kind.concerns(thing)]


def _with_subclasses(root: type) -> Iterator[type]:
    yield root
    subclasses: list[type] = type.__subclasses__(root)
    for below in subclasses:
        yield from _with_subclasses(below)


def _signature(kind: Kind, one: Any) -> str:
    digest = hashlib.sha1("\n".join(kind.names(one)).encode(), usedforsecurity=False)
    return f"{type(kind).__name__}:{digest.hexdigest()[:16]}"
