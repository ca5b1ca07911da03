"""Lists the user's names on a rank with short descriptions, without copies and without running
user code.

A value that cannot be described, as it changes or misbehaves, does not affect other names.
"""

from __future__ import annotations

import contextlib
import fnmatch
import types
from itertools import islice
from typing import Any

import msgspec
import torch

from ...wire.inspect import Names, TensorSummary
from ..rank.shell import RankShell
from ..static_lookup import held_by
from .chunks import digest_of_bytes, digest_of_tensor, readable
from .safe_read import DIRECT, SafeReader, UnreadableError
from .safe_repr import KNOWN, full_name_of, shorten
from .summary import describe_tensor, num_bytes_of, own_part, text_of_number
from .tree import as_known, tensors_of, walk

# Largest tensor that is digested for comparison between ranks: well below a millisecond.
_MAX_DIGEST_BYTES = 1 << 20
_MAX_ITEMS = 10_000


def names(shell: RankShell, subject: Names, read: SafeReader) -> tuple[TensorSummary, ...]:
    """Return the names that the user has bound on a rank, with short descriptions (see `Names`)."""
    return tuple(
        describe_shortly(value, read).at(name)
        for name, value in users_names(shell).items()
        if fnmatch.fnmatchcase(name, subject.pattern)
    )


def users_names(shell: RankShell) -> dict[str, Any]:
    """Return the names that the user has bound on this rank, with their values."""
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in list(shell.user_ns.items())
        if type(name) is str
        and not name.startswith("_")
        and not (name in hidden and hidden[name] is value)
    }


def describe_shortly(value: Any, read: SafeReader = DIRECT) -> TensorSummary:
    """Describe a value at low cost: no statistics, and a digest only for small values."""
    kind = full_name_of(type(value))
    try:
        with torch._C.DisableTorchFunctionSubclass():  # it may be user code
            if issubclass(type(value), torch.Tensor):
                return _tensor(kind, value, read)
            text, is_whole = _text(value)
            found = TensorSummary(
                kind="type" if issubclass(type(value), type) else kind,
                text=text,
                num_bytes=sum(_bytes_of(*each) for each in islice(walk(value), _MAX_ITEMS)),
                digest=digest_of_bytes(text.encode()) if is_whole else "",
            )
            if kind != "numpy.ndarray":
                return found
            shape, dtype = tuple(value.shape), str(value.dtype)
            return msgspec.structs.replace(found, shape=shape, local_shape=shape, dtype=dtype)
    except Exception:
        return TensorSummary(kind=kind)


def _tensor(kind: str, value: torch.Tensor, read: SafeReader) -> TensorSummary:
    summary = describe_tensor(kind, value, is_read=False, read=read)
    is_cheap = (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and summary.num_bytes <= _MAX_DIGEST_BYTES
        and summary.device == "cpu"
    )
    if not is_cheap:
        return summary
    digest, text = digest_of_tensor(value.detach(), read), ""
    if digest and summary.num_elements == 1:
        with contextlib.suppress(UnreadableError):
            text = text_of_number(readable(value, read.is_beside)[0], read)
    return msgspec.structs.replace(summary, text=text, digest=digest)


def _text(value: Any) -> tuple[str, bool]:
    """Return a short informative text of a value, or "", and whether the text describes the whole
    value.
    """
    kind = type(value)
    if kind is types.ModuleType:
        name = held_by(value).get("__name__", "")
        return name if type(name) is str else "", False
    if issubclass(kind, torch.nn.Module):
        return f"{sum(each.numel() for _, each in tensors_of(value)):,} parameters", False
    return shorten(value) if kind in KNOWN else ("", False)


def _bytes_of(path: str, part: Any) -> int:
    if not as_known(part) or path.startswith("param_groups["):  # those belong to a model
        return 0
    is_tensor = issubclass(type(part), torch.Tensor)
    return num_bytes_of(own_part(part)) if is_tensor else int(part.nbytes)
