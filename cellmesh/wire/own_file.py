"""Files of a mesh's directory, which only their owner may read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec

from ..errors import HostError
from .secret import SecretBytes, to_json

# A ticket has some kilobytes: the notebook's sys.path is the longest of it.
_MAX_BYTES = 1 << 20


def read_own_file(path: Path) -> SecretBytes:
    """Read a small regular file that only its owner may read; never blocks on a pipe."""
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
            f"{path} is not yours alone (owner {facts.st_uid}, mode "
            f"{stat.S_IMODE(facts.st_mode):04o}), so it is not used: if it is yours, `chmod 600 "
            f"{path}`"
        )
    return text


def is_others(facts: os.stat_result) -> bool:
    """Whether a file is another user's, or others may read it."""
    return facts.st_uid != os.getuid() or bool(stat.S_IMODE(facts.st_mode) & 0o077)


def write_whole(path: Path, value: msgspec.Struct) -> None:
    """Write a struct to its file as JSON, mode 0600, whole or not at all.

    Raises:
        HostError: it cannot be written.
    """
    draft = path.with_suffix(".new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(to_json(value, indent=2))
        draft.replace(path)
    except OSError as e:
        raise cannot_write(path, e) from e


def cannot_write(path: Path, error: OSError) -> HostError:
    """Return the error that says why a file or directory of a mesh cannot be written."""
    return HostError(
        f"cannot write {path}: {error.strerror or error}. Free some space or make it writable, or "
        "set JUPYTER_RUNTIME_DIR to another directory"
    )
