"""Answers requests about replicas (see `wire.replicas`): checks and compares them, without a
collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import MeshUsageError
from ...wire import payload
from ...wire.codec import Frame
from ...wire.replicas import (
    AnyRequest,
    Check,
    Compare,
    Distance,
    Entry,
    GatherNames,
    GatherTensor,
    SurveyNames,
    Sync,
)
from ..inspect.chunks import digest_of_tensor
from ..rank.features import Packed
from . import copying, syncing
from .parts import ModelPart, find_parts, rng_parts

if TYPE_CHECKING:
    from ..rank.features import RankContext

_CHUNK = 1 << 22  # number of elements compared at a time
_TEXT_CHARS = 60


class ReplicaHandler:
    """Answers the requests about replicas on one rank.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._namespace, self._context = context.shell.user_ns, context

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a request on the main thread; see `rank.features.Handler`."""
        namespace = self._namespace
        match request:
            case Check():
                return check(namespace, request.expression)
            case Compare():
                theirs = payload.loads(request.payload, buffers)
                return compare(namespace, request.expression, request.path, theirs)
            case GatherTensor():
                return find_tensor(namespace, request.expression, request.path)
            case Sync():
                return syncing.sync(namespace, request.expression, request.source)
            case SurveyNames():
                return copying.survey(namespace, self._context.actors.name_of)
            case GatherNames():
                return Packed(*copying.gather(namespace, request.names))


make_handler = ReplicaHandler


def check(namespace: Mapping[str, Any], expression: str) -> list[Entry]:
    """Return digests of the tensors and values in an expression's value. Runs no collective.

    Args:
        namespace: namespace of the rank.
        expression: a model, an optimizer, a tensor, a number, a scheduler, a generator, or a
            container or object that holds them; ``rng`` for the process's generators (unless the
            namespace has that name); "" for all wrapped models (DDP, FSDP, tensor parallel) and
            their optimizers at top level, and the process's generators, which may differ.

    Returns:
        One entry for each tensor or value.

    Raises:
        MeshUsageError: the value has nothing to compare.
    """
    parts, left_out, _ = find_parts(namespace, expression)
    if not expression.strip() and parts:
        parts += rng_parts()
    return [*map(_entry, parts), *left_out]


def _entry(part: ModelPart) -> Entry:
    facts: dict[str, Any] = {
        **{"path": part.path, "kind": part.kind, "ranks": part.holders.ranks},
        "why_differs": part.why_differs,
    }
    if not isinstance(part.value, torch.Tensor):
        text = "" if part.kind == "rng" else repr(part.value)
        data = part.value if isinstance(part.value, bytes) else text.encode(errors="replace")
        digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        shown = text if len(text) <= _TEXT_CHARS else text[: _TEXT_CHARS - 1] + "…"
        return Entry(**facts, digest=digest, text=shown)
    local = part.local()
    dtype, shape = str(local.dtype).removeprefix("torch."), tuple(local.shape)
    return Entry(**facts, dtype=dtype, shape=shape, digest=digest_of_tensor(local))


def find_tensor(namespace: Mapping[str, Any], expression: str, path: str) -> torch.Tensor:
    """Return this rank's part of a tensor that `check` has found, copied to the CPU.

    Raises:
        MeshUsageError: the tensor no longer exists, or is no tensor.
    """
    local = _find_local(namespace, expression, path)
    return local.cpu().clone(memory_format=torch.contiguous_format)


def _find_local(namespace: Mapping[str, Any], expression: str, path: str) -> torch.Tensor:
    parts, _, _ = find_parts(namespace, expression)
    for part in parts:
        if part.path == path and isinstance(part.value, torch.Tensor):
            return part.local()
    raise MeshUsageError(f"there is no tensor {path} on this rank")


def compare(
    namespace: Mapping[str, Any], expression: str, path: str, theirs: torch.Tensor
) -> Distance:
    """Return the distance between this rank's part of a tensor and another rank's.

    Args:
        namespace: namespace of the rank.
        expression: as for `check`.
        path: path of the tensor.
        theirs: the other rank's part, on the CPU.

    Raises:
        MeshUsageError: the tensor does not exist here, or has another shape or dtype.
    """
    ours = _find_local(namespace, expression, path)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise MeshUsageError(
            f"{path} is {tuple(ours.shape)} {ours.dtype} here, and {tuple(theirs.shape)} "
            f"{theirs.dtype} there"
        )
    return distance(ours, theirs)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    """Return the distance between two tensors of the same shape and dtype; needs little memory."""
    flat_ours, flat_theirs = ours.reshape(-1), theirs.reshape(-1)
    num_differing = num_nan = 0
    max_abs, first = 0.0, -1
    for start in range(0, flat_ours.numel(), _CHUNK):
        a, b = (_widened(flat[start : start + _CHUNK].cpu()) for flat in (flat_ours, flat_theirs))
        a_nan, b_nan = torch.isnan(a), torch.isnan(b)
        differs = (a != b) & ~(a_nan & b_nan)
        if not bool(differs.any()):
            continue
        if first < 0:
            first = start + int(differs.nonzero()[0])
        one_nan = a_nan ^ b_nan
        num_differing += int(differs.sum())
        num_nan += int(one_nan.sum())
        pick = differs & ~one_nan
        if bool(pick.any()):
            max_abs = max(max_abs, _largest_gap(a[pick], b[pick], ours.dtype))
    if first < 0:
        return Distance(num_differing=0, num_elements=flat_ours.numel())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), ours.shape))
    return Distance(
        num_differing=num_differing,
        num_elements=flat_ours.numel(),
        max_abs=max_abs,
        num_nan=num_nan,
        first_index=index,
        ours=_text(flat_ours[first]),
        theirs=_text(flat_theirs[first]),
    )


def _widened(values: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to a dtype that supports all comparisons, without losing bits."""
    if values.is_complex():
        return values.to(torch.complex128)
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


def _largest_gap(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest absolute difference between two tensors that `_widened` has converted from
    `dtype`.
    """
    if a.is_complex() or a.is_floating_point():
        return float((a - b).abs().max().item())
    # float64 has too few bits for 64-bit integers. Their difference may wrap around, but read as
    # unsigned, it is exact.
    kind = np.uint64 if dtype == torch.uint64 else np.int64
    one, other = a.numpy().view(kind), b.numpy().view(kind)
    gaps = np.maximum(one, other) - np.minimum(one, other)
    return float(gaps.view(np.uint64).max())


def _text(element: torch.Tensor) -> str:
    value = element.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
