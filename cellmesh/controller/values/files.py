"""Values that ranks read from files; the controller checks the files."""

from __future__ import annotations

import os
import zipfile

from ...errors import MeshUsageError
from ...wire.files import SUFFIXES, FileValue, choose, read_npy, read_safetensors


def from_file(path: str | os.PathLike[str], key: str | None = None) -> FileValue:
    """Name a value that each rank reads from a file itself:
    `mesh.push(x=cellmesh.from_file("w.npy"))`.

    The file is mapped copy-on-write, so that ranks share its pages, read what they touch and change
    no file. Of one that is pushed with ``shard=`` or ``placements=``, each rank reads its part.

    Args:
        path: a ``.safetensors``, ``.npy``, or ``.pt`` (``.pth``) file of ``torch.save``.
        key: of a tensor in it; None for all: a dict of tensors, or what was saved.

    Raises:
        MeshUsageError: there is no such file or key, or the file is shorter than its header says.
    """
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        num_bytes = os.stat(absolute).st_size
        suffix = os.path.splitext(absolute)[1].lower()
        if suffix == ".safetensors":
            entries = read_safetensors(absolute)
            if key is None:
                return FileValue(absolute, None, num_bytes)
            return FileValue(
                absolute, key, num_bytes, tuple(choose(entries, key, absolute)["shape"])
            )
        if suffix == ".npy":
            if key is not None:
                raise MeshUsageError(
                    f"{absolute} holds one array, and no key {key!r}: leave the key out"
                )
            return FileValue(absolute, None, num_bytes, read_npy(absolute).shape)
    except OSError as e:
        raise MeshUsageError(f"{absolute} cannot be read: {e.strerror}") from e
    if suffix not in SUFFIXES:
        raise MeshUsageError(f"{absolute} is no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    if not zipfile.is_zipfile(absolute):
        raise MeshUsageError(
            f"{absolute} ({num_bytes} bytes) was cut short, or is no file that torch.save writes "
            "since 1.6"
        )
    return FileValue(absolute, key, num_bytes)
