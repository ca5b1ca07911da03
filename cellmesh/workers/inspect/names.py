"""Lists the user's names on a rank with short descriptions, without copies and without running
user code.

A value that cannot be told, as it changes meanwhile or is odd, costs no other name its row.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import types
from typing import Any

import msgspec
import torch

from ...wire.inspect import Bound, Names, TensorSummary, alphabetically
from ..rank.shell import RankShell
from ..static_lookup import held_by
from .chunks import digest_of_bytes, digest_of_tensor, readable
from .safe_read import DIRECT, SafeReader, UnreadableError
from .safe_repr import full_name_of, name_of, shorten
from .summary import describe_tensor, own_part, text_of_number
from .tree import parameters_of

# What a rank puts into its namespace itself; with other values, these are the user's.
_OWN = ("rank", "local_rank", "world_size", "device", "mesh", "torch", "dist")
_OWN_MODULES = {"torch": "torch", "dist": "torch.distributed"}
# Values of a tensor are compared between ranks up to this size: it takes well below a millisecond.
_MAX_DIGEST_BYTES = 1 << 20
_MAX_ITEMS = 10_000
_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    range,
    type(None),
    list,
    tuple,
    dict,
    set,
    frozenset,
)


def names(shell: RankShell, subject: Names, read: SafeReader) -> Bound:
    """Return the names that the user has bound on a rank, with short descriptions (see `Names`)."""
    found = [name for name in users_names(shell) if fnmatch.fnmatchcase(name, subject.pattern)]
    found.sort(key=alphabetically)
    chosen = found[: subject.max_names]
    told = (
        describe_shortly(shell.user_ns[name], read).at(name)
        for name in chosen
        if name in shell.user_ns
    )
    return Bound(tuple(told), len(found) - len(chosen))


def users_names(shell: RankShell) -> dict[str, Any]:
    """Return the names that the user has bound on this rank, and their values."""
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in list(shell.user_ns.items())
        if type(name) is str
        and not name.startswith("_")
        and not (name in hidden and hidden[name] is value)
        and not _is_own(name, value)
    }


def _is_own(name: str, value: Any) -> bool:
    if name not in _OWN:
        return False
    if name in _OWN_MODULES:
        return value is sys.modules.get(_OWN_MODULES[name])
    kind = type(value)
    if name == "device":
        return kind is torch.device
    if name == "mesh":
        return kind.__module__ == "torch.distributed.device_mesh"
    return kind is int and value.bit_length() < 64 and os.environ.get(name.upper()) == str(value)


def describe_shortly(value: Any, read: SafeReader = DIRECT) -> TensorSummary:
    """Describe a value cheaply: no statistics, and a digest only of small values."""
    name = full_name_of(type(value))
    try:
        with torch._C.DisableTorchFunctionSubclass():  # it may be code of the user's
            return _describe(name, value, read)
    except Exception:
        return TensorSummary(kind=name)


def _describe(name: str, value: Any, read: SafeReader) -> TensorSummary:
    if issubclass(type(value), torch.Tensor):
        return _tensor(name, value, read)
    if name == "numpy.ndarray":
        return TensorSummary(
            kind=name,
            shape=tuple(value.shape),
            local_shape=tuple(value.shape),
            dtype=str(value.dtype),
            num_bytes=value.nbytes,
        )
    if issubclass(type(value), type):  # also one that a metaclass makes
        name = "type"
    text, is_whole = _text(value)
    digest = digest_of_bytes(text.encode()) if is_whole else ""
    return TensorSummary(kind=name, text=text, num_bytes=_bytes_in(value), digest=digest)


def _tensor(name: str, value: torch.Tensor, read: SafeReader) -> TensorSummary:
    summary = describe_tensor(name, value, is_read=False, has_digest=False, read=read)
    local = own_part(value).local
    is_cheap = (
        type(local) in (torch.Tensor, torch.nn.Parameter)
        and summary.num_bytes <= _MAX_DIGEST_BYTES
        and summary.device == "cpu"
        and not summary.placements
    )
    if not is_cheap:
        return summary
    local = local.detach()
    return msgspec.structs.replace(
        summary, text=_number(local, read), digest=digest_of_tensor(local, read)
    )


def _number(local: torch.Tensor, read: SafeReader) -> str:
    if local.numel() != 1 or local.is_meta or local.layout != torch.strided:
        return ""
    try:
        return text_of_number(readable(local, read.is_beside)[0], read)
    except UnreadableError:
        return ""


def _text(value: Any) -> tuple[str, bool]:
    """Return a short text of a value, if that is informative, and whether it describes all of the
    value.
    """
    kind = type(value)
    if kind is types.ModuleType:
        name = held_by(value).get("__name__", "")
        return name if type(name) is str else "", False
    if kind is types.FunctionType:
        code = value.__code__
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return f"({', '.join(arguments)})", False
    if issubclass(kind, type):
        return f"({', '.join(map(name_of, type.__dict__['__bases__'].__get__(value)))})", False
    if issubclass(kind, torch.nn.Module):
        count = sum(parameter.numel() for _, parameter in parameters_of(value))
        return f"{count:,} parameters", False
    if kind in _PLAIN:
        return shorten(value)
    if kind in (torch.device, torch.dtype, torch.Size):
        return str(value), False
    return "", False


def _bytes_in(value: Any) -> int:
    """Return how many bytes a value's tensors hold on this rank; 0 if counting would take long."""
    kind = type(value)
    if issubclass(kind, str):
        return str.__len__(value)
    if issubclass(kind, bytes):
        return bytes.__len__(value)
    if issubclass(kind, torch.nn.Module):
        return sum(_bytes_of(parameter) for _, parameter in parameters_of(value))
    if issubclass(kind, torch.optim.Optimizer):
        state = held_by(value).get("state")
        states = list(dict.values(state)) if isinstance(state, dict) else []
        return sum(_bytes_in(each) for each in states)
    if issubclass(kind, dict):
        return sum(map(_bytes_of, list(dict.values(value))[:_MAX_ITEMS]))
    if issubclass(kind, list | tuple):
        return sum(
            map(_bytes_of, list(kind.__iter__(value))[:_MAX_ITEMS] if kind in (list, tuple) else ())
        )
    return 0


def _bytes_of(value: Any) -> int:
    if not issubclass(type(value), torch.Tensor):
        return 0
    local = own_part(value).local
    return int(local.numel() * local.element_size())
