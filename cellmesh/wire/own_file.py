"""Reads and writes files that only their owner may read, and strings that hide keys from
tracebacks.

The `repr` of such a string hides its text, as some tracebacks show local variables (IPython's
``%xmode Verbose``).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ..errors import HostError

S = TypeVar("S", bound=msgspec.Struct)

# A ticket has some kilobytes; the notebook's sys.path is its longest part.
_MAX_BYTES = 1 << 20


def read_own_file(path: Path) -> SecretBytes:
    """Read a small file, and refuse one that is not regular or that other users may read; never
    blocks, as on a pipe.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        )
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            is_regular = stat.S_ISREG(facts.st_mode)
            text = SecretBytes(file.read(_MAX_BYTES + 1) if is_regular else b"")
    except OSError as e:
        what = "it is a link" if e.errno == errno.ELOOP else e.strerror
        raise HostError(f"cannot read {path}: {what}") from e
    if not is_regular or len(text) > _MAX_BYTES:
        raise HostError(
            f"{path} is no ticket: it is no file, or larger than {_MAX_BYTES >> 20} MiB"
        )
    if is_others(facts):
        raise HostError(
            f"{path} is not yours alone (owner {_user(facts.st_uid)}, mode "
            f"{stat.S_IMODE(facts.st_mode):04o}), so it is not used: if it is yours, `chmod 600 "
            f"{path}`"
        )
    return text


def _user(uid: int) -> str:
    import pwd  # for errors

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_others(facts: os.stat_result) -> bool:
    """Return whether a file belongs to another user, or other users may access it."""
    return facts.st_uid != os.getuid() or bool(stat.S_IMODE(facts.st_mode) & 0o077)


def open_own_directory(path: Path, makes: bool = True) -> int:
    """Open a directory of this user's.

    Args:
        path: the directory; no other user can put a link in its place once it is open.
        makes: whether to make it if there is none.

    Raises:
        OSError: it cannot be made or opened, or is not this user's alone.
    """
    if makes:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if is_others(os.fstat(directory)):
        os.close(directory)
        raise PermissionError(errno.EPERM, "it is not yours alone", os.fspath(path))
    return directory


def write_whole(path: Path, value: msgspec.Struct, indent: int | None = 2) -> None:
    """Write a struct to a file as JSON, atomically and with mode 0600.

    Args:
        path: the file.
        value: the struct.
        indent: indentation of its lines; None for one line.

    Raises:
        HostError: the file cannot be written.
    """
    draft = path.with_suffix(".new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(to_json(value, indent))
            file.write(b"\n")  # as one line it may be written to a command's standard input
        draft.replace(path)
    except OSError as e:
        raise cannot_write(path, e) from e


def cannot_write(path: Path, error: OSError) -> HostError:
    """Return the error to raise if a file or directory of a mesh cannot be written."""
    return HostError(
        f"cannot write {path}: {error.strerror or error}. Free some space or make it writable, or "
        "set JUPYTER_RUNTIME_DIR to another directory"
    )


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: the file is not regular, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file is not regular, has more than `max_bytes`, or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return content


class Secret(str):
    """A key as text, hidden in its `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"


class SecretBytes(bytes):
    """Bytes that contain a key (a file's content, a message), hidden in their `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"


def to_json(value: msgspec.Struct, indent: int | None = None) -> SecretBytes:
    """Return a struct as JSON.

    msgspec would write UTF-8 only; paths in a ticket may have other bytes (as surrogates).
    """
    return SecretBytes(json.dumps(value, indent=indent, default=msgspec.structs.asdict).encode())


def from_json(text: bytes, type: type[S]) -> S:
    """Parse a struct from JSON that `to_json` has written; the text may be secret, and no traceback
    contains it.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        return msgspec.convert(json.loads(text), type, dec_hook=_as_secret)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(problem)  # without the frames of `json`, which hold the text


def _as_secret(type: type[Any], value: Any) -> Any:
    if not isinstance(value, str):
        raise TypeError("Expected `str`")
    return type(value)
