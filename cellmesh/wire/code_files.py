"""The messages by which the user's modules are made the same on all hosts of a mesh.

The files beside the notebook have one name, the hash of all their contents (`name_of`). The
controller sends agents an archive (`PlaceFiles`), which leads from the files of one name to those
of another; each agent answers with the name of the files that its host has then (`FilesAnswer`).
Files are bytes on their way: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .verb import Verb

# Of a file's content.
DIGEST_BYTES = 16


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of an archive.

    Attributes:
        path: the number of its directory among the mesh's (`Ticket.roots`), and its path in that:
            ``0/package/module.py``.
        mtime_ns: of the file.
        content: of the file.
    """

    path: str
    mtime_ns: int
    content: bytes


class PlaceFiles(Verb, frozen=True):
    """Have an agent put files in place; the buffer that follows is a part of their archive.

    Attributes:
        request: that is answered (`FilesAnswer`) after its last part.
        name: of the files.
        base: the name of the files that the archive adds to; "" if it has all files.
        removed: paths of files of `base` that no longer exist.
        is_last: no part of the archive follows.
        num_buffers: 1.
    """

    request: int
    name: str
    base: str
    removed: tuple[str, ...] = ()
    is_last: bool = True
    num_buffers: int = 1


class FilesAnswer(Verb, frozen=True):
    """Answer `PlaceFiles`.

    Attributes:
        request: of the `PlaceFiles`.
        name: of the files that the host has.
        problem: why the files cannot be placed; "" if they can.
    """

    request: int
    name: str = ""
    problem: str = ""


def digest_of(content: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a file's content."""
    import hashlib  # 10 ms, and only for meshes on many hosts

    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def name_of(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Return the name of files, given the path, time and digest of each."""
    return digest_of(msgspec.msgpack.encode(sorted(files))).hex()


def is_inside(path: str) -> bool:
    """Whether a relative path stays inside the directory that it is relative to."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not {"", ".", ".."} & set(parts)
