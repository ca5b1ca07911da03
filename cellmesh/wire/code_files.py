"""The messages by which the user's modules are made the same on all hosts of a mesh.

The controller offers what there is beside the notebook, by path and hash (`OfferFiles`); each agent
answers what its host lacks (`FilesAnswer`), gets that (`SendFiles`), and answers again once every
file is in its place. Files are bytes on their way: nothing is unpickled.
"""

from __future__ import annotations

import msgspec

from .verb import Verb

# Of a file's content.
DIGEST_BYTES = 16


class CodeFile(msgspec.Struct, frozen=True, array_like=True):
    """One file beside the notebook.

    Attributes:
        root: the place of its directory among the mesh's (`Ticket.roots`).
        path: relative to that, with ``/`` between its parts.
        digest: of its content.
        num_bytes: its size.
        mtime_ns, ctime_ns, inode: as the notebook's host sees it: a host on which they are the
            same shares the file.
    """

    root: int
    path: str
    digest: bytes
    num_bytes: int
    mtime_ns: int
    ctime_ns: int = 0
    inode: int = 0


class OfferFiles(Verb, frozen=True):
    """Ask an agent to have these files in some roots, and no others that were offered before.

    Attributes:
        request: that is answered (`FilesAnswer`).
        roots: the places of the directories that the files belong to.
        files: in these directories.
        boot: of the notebook's host (`Place.boot`): an agent on the same machine may see the
            very same files.
    """

    request: int
    roots: tuple[int, ...]
    files: tuple[CodeFile, ...]
    boot: str = ""


class SendFiles(Verb, frozen=True):
    """Carry contents that one host lacks, in the buffers that follow.

    Attributes:
        request: that is answered once all that the host lacks has arrived.
        digests: of the contents.
        num_buffers: how many there are.
    """

    request: int
    digests: tuple[bytes, ...]
    num_buffers: int


class FilesAnswer(Verb, frozen=True):
    """Say which contents a host lacks; if none, its files are in their places.

    Attributes:
        request: of the `OfferFiles` or `SendFiles`.
        missing: the contents that are to be sent.
        problem: why the files cannot be placed; "" if they can.
    """

    request: int
    missing: tuple[bytes, ...] = ()
    problem: str = ""


def digest_of(content: bytes | bytearray | memoryview) -> bytes:
    """Return the hash by which the content of a file is known."""
    import hashlib  # 10 ms, and only for meshes on many hosts

    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def is_inside(path: str) -> bool:
    """Whether a relative path stays inside the directory that it is relative to."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not {"", ".", ".."} & set(parts)
