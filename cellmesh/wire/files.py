"""Values in files: the notebook sends paths, and each rank maps the file itself, copy-on-write."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MeshUsageError
from .segments import map_range

SUFFIXES = (".safetensors", ".npy", ".pt", ".pth")
# safetensors' names of torch's types.
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class FileValue:
    """Stands for the content of a file; unpickling it on a rank maps the file.

    Attributes:
        path: absolute.
        key: of a value in the file; None for all of it.
        num_bytes: the file's length.
        shape: of the value, where that is known without loading it.
    """

    path: str
    key: str | None
    num_bytes: int
    shape: tuple[int, ...] | None = None

    def __reduce__(self) -> Any:
        return load, (self.path, self.key, self.num_bytes)


def load(path: str, key: str | None, num_bytes: int) -> Any:
    """Map the file that a `FileValue` names, and return its content or the value at its key.

    Args:
        path, key, num_bytes: its attributes.

    Raises:
        MeshUsageError: the file is another one here than where it was named.
    """
    found = os.stat(path).st_size
    if found != num_bytes:
        raise MeshUsageError(
            f"{path} is {found} bytes long here, and was {num_bytes} when it was named"
        )
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".npy":
        return read_npy(path)
    if suffix == ".safetensors":
        return _map_safetensors(path, key)
    import torch

    value = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return value if key is None else choose(value, key, path)


def read_npy(path: str) -> Any:
    """Map the array in an ``.npy`` file copy-on-write, and return it.

    Raises:
        MeshUsageError: the file is none, or was cut short.
    """
    import numpy

    try:
        return numpy.asarray(numpy.load(path, mmap_mode="c"))
    except (ValueError, EOFError) as e:
        raise MeshUsageError(f"{path} ({os.stat(path).st_size} bytes) cannot be mapped: {e}") from e


def read_safetensors(path: str) -> dict[str, Any]:
    """Read the header of a safetensors file: which tensors there are, and where.

    Returns:
        name -> dtype, shape and absolute offsets of each tensor.

    Raises:
        MeshUsageError: the file is none, or was cut short.
    """
    num_bytes = os.stat(path).st_size
    with open(path, "rb") as file:
        head = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (_MAX_HEADER_BYTES + 1,)
        try:
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header has no end")
            header = json.loads(file.read(length))
            base = _LENGTH.size + length
            entries = {
                name: {**entry, "data_offsets": [base + at for at in entry["data_offsets"]]}
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise MeshUsageError(
                f"{path} ({num_bytes} bytes) is no safetensors file, or was cut short: {e}"
            ) from e
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if end > num_bytes:
        raise MeshUsageError(
            f"{path} is {num_bytes} bytes long, and its header says {end}: it was cut short (is "
            "it still being written, or downloaded?)"
        )
    return entries


def _map_safetensors(path: str, key: str | None) -> Any:
    entries = read_safetensors(path)
    chosen = entries if key is None else {key: choose(entries, key, path)}
    with open(path, "rb") as file:
        start = min((entry["data_offsets"][0] for entry in chosen.values()), default=0)
        end = max((entry["data_offsets"][1] for entry in chosen.values()), default=0)
        memory = map_range(file.fileno(), start, end - start) if end > start else memoryview(b"")
    tensors = {name: _as_tensor(entry, memory, start) for name, entry in chosen.items()}
    return tensors if key is None else tensors[key]


def _as_tensor(entry: Mapping[str, Any], memory: memoryview, start: int) -> Any:
    import torch

    if entry["dtype"] not in _TYPES:
        raise MeshUsageError(
            f"a tensor of type {entry['dtype']} cannot be mapped: load it with safetensors"
        )
    dtype = getattr(torch, _TYPES[entry["dtype"]])
    first, last = (at - start for at in entry["data_offsets"])
    if last - first != math.prod(entry["shape"]) * dtype.itemsize:
        raise MeshUsageError(
            f"a tensor of shape {entry['shape']} has {last - first} bytes: damaged"
        )
    if first == last:
        return torch.empty(entry["shape"], dtype=dtype)
    part = memory[first:last]
    if (start % mmap.PAGESIZE + first) % dtype.itemsize:  # where its type must not begin
        part = memoryview(bytearray(part))
    return torch.frombuffer(part, dtype=dtype).reshape(entry["shape"])


def choose(values: Any, key: str, path: str) -> Any:
    """Return the value at a key of a file's content; in nested dicts, the keys joined by dots.

    Raises:
        MeshUsageError: there is none; says which there are.
    """
    try:
        return values[key]
    except (KeyError, TypeError, IndexError):
        first, dot, rest = key.partition(".")
        if dot and isinstance(values, Mapping) and first in values:
            return choose(values[first], rest, path)
        known = ", ".join(map(str, list(values)[:10])) if isinstance(values, Mapping) else "none"
        raise MeshUsageError(f"{path} has no key {key!r}; it has {known}") from None
