"""Describe a value of the rank's namespace: tensors by their numbers, others by type and repr."""

from __future__ import annotations

import ast
import hashlib
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ..wire.facts import Facts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TEXT_CHARS = 200
_DIGEST_BYTES = 12
_PIECE_BYTES = 1 << 22
# What may be evaluated beside a running main thread: it must not run user code that could block or write.
_QUIET_NODES = (
    ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.Tuple,
    ast.UnaryOp, ast.USub, ast.Load,
)  # fmt: skip


def is_quiet(expression: str) -> bool:
    """Whether an expression only follows names, attributes and indices."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        return False
    return all(isinstance(node, _QUIET_NODES) for node in ast.walk(tree))


def describe(value: Any) -> Facts:
    """Describe one value.

    Args:
        value: anything; tensors, parameters and DTensors are described by their numbers, arrays likewise.

    Returns:
        The facts. No collective is run: a DTensor is described by the rank's part of it.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, torch.Tensor):
        return _describe_tensor(kind, value)
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        try:
            # A copy of its own: torch takes no negative strides, foreign byte orders or read-only memory.
            copy = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
            return _describe_tensor(kind, torch.as_tensor(copy))
        except TypeError:  # strings, objects
            pass
    return Facts(kind=kind, text=_short(value), digest=_digest(_repr(value).encode(errors="replace")))


def _describe_tensor(kind: str, value: torch.Tensor) -> Facts:
    local, placements, shard = _local_part(value)
    local = local.detach()
    has_numbers = local.numel() and local.layout == torch.strided and not local.is_meta
    statistics = _statistics(local) if has_numbers else {}
    return Facts(
        kind=kind,
        shape=tuple(value.shape),
        local_shape=tuple(local.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(local.device),
        placements=placements,
        requires_grad=value.requires_grad,
        num_bytes=local.numel() * local.element_size(),
        shard=shard,
        digest=digest_of_tensor(local),
        **statistics,
    )


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor; imports DTensor only if something else has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_part(value: torch.Tensor) -> tuple[torch.Tensor, str, tuple[int, ...]]:
    """The rank's own part, the placements, and which part it is."""
    if not is_dtensor(value):
        return value, "", ()
    from torch.distributed.tensor import Replicate

    coordinate: Sequence[int] = value.device_mesh.get_coordinate() or ()
    shard = tuple(
        -1 if isinstance(placement, Replicate) else index
        for placement, index in zip(value.placements, coordinate, strict=False)
    )
    placements = ", ".join(str(placement) for placement in value.placements)
    return value.to_local(), placements, shard


def _statistics(local: torch.Tensor) -> Mapping[str, Any]:
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    numbers = local.double() if local.numel() < 1 << 20 else local.float()
    finite_mask = torch.isfinite(numbers)
    finite = numbers if bool(finite_mask.all()) else numbers[finite_mask]
    counts = {
        "num_nan": int(torch.isnan(numbers).sum()),
        "num_inf": int(torch.isinf(numbers).sum()),
    }
    if not finite.numel():
        return counts
    return {
        "min": finite.min().item(),
        "max": finite.max().item(),
        "mean": finite.mean().item(),
        "std": finite.std(correction=0).item(),
        "norm": torch.linalg.vector_norm(finite).item(),
        **counts,
    }


def digest_of_tensor(local: torch.Tensor) -> str:
    if local.layout != torch.strided or local.is_meta:
        return ""
    plain = local.resolve_conj().resolve_neg().contiguous().cpu()
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if plain.numel():
        for piece in plain.reshape(-1).view(torch.uint8).split(_PIECE_BYTES):  # type: ignore[no-untyped-call]
            # A copy: memory that numpy has seen can never be resized again, as FSDP2 does with parameters.
            digest.update(piece.clone().numpy().data)
    return digest.hexdigest()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as e:
        return f"<its repr() raised {type(e).__name__}>"


def _short(value: Any) -> str:
    text = reprlib.repr(value) if type(value).__module__ == "builtins" else _repr(value)
    return text if len(text) <= _TEXT_CHARS else text[: _TEXT_CHARS - 1] + "…"
