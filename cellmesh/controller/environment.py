"""The options that shape the ranks' environment: variables that are passed on, and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import MeshUsageError
from ..wire.environment import SET_BY_MESH, VISIBLE
from ..wire.own_file import Secret

# A ticket, which carries them, has at most a megabyte.
_MAX_BYTES = 256 << 10
_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F-]+")
NO_GPUS = "none"


def read_environment(
    given: Mapping[str, str] | Iterable[str] | str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Read which environment variables the ranks get.

    Args:
        given: names and values; or texts, each ``NAME`` for the notebook's value or ``NAME=value``.
        environment: the notebook's.

    Returns:
        Names and values.

    Raises:
        MeshUsageError: a name is none, is not set in the notebook, or is set by the mesh itself.
    """
    if isinstance(given, str):
        given = [given]
    elif not isinstance(given, Mapping | list | tuple | set | frozenset):
        raise _is_no_environment(given)
    chosen: dict[str, str] = {}
    for name in given:
        if not isinstance(name, str):
            raise _is_no_environment(name)
        if isinstance(given, Mapping):
            value: Any = given[name]
        else:
            name, equals, text = name.partition("=")
            value = text if equals else environment.get(name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise MeshUsageError(f"--env {name!r} is no name of an environment variable")
        if name in SET_BY_MESH or name == VISIBLE:
            instead = "--gpus chooses GPUs" if name == VISIBLE else "leave it out"
            raise MeshUsageError(f"--env {name}: the mesh sets {name} on each rank: {instead}")
        if value is None:
            raise MeshUsageError(
                f"--env {name}: {name} is not set in the notebook: set it there "
                f"(os.environ[{name!r}] = ...), or give its value, as in --env {name}=value"
            )
        if not isinstance(value, str) or "\0" in value:  # which is not shown: it may be a secret
            raise MeshUsageError(f"--env {name}: the value of {name} must be text without NULs")
        chosen[name] = Secret(value)
    num_bytes = sum(len(name) + len(value) for name, value in chosen.items())
    if num_bytes > _MAX_BYTES:
        raise MeshUsageError(
            f"--env: {len(chosen)} variables have {num_bytes >> 10} kB, and at most "
            f"{_MAX_BYTES >> 10} kB can be passed on: put large values into a file"
        )
    return chosen


def _is_no_environment(given: object) -> MeshUsageError:
    return MeshUsageError(
        f"env must be names, or names and values, like ['HF_HOME'] or {{'HF_HOME': '/data'}}, and "
        f"not of type {type(given).__name__}"
    )


def read_gpus(given: Any) -> tuple[str, ...]:
    """Read which GPUs the ranks of each host use.

    Args:
        given: ``0,2`` or ``none``; or a list, or one number.

    Raises:
        MeshUsageError: it is not of that form.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if not isinstance(given, str | list | tuple):
        raise MeshUsageError(f"gpus must be like 0,2 or [0, 2], and not {given!r}")
    if isinstance(given, str):
        if given.strip() == NO_GPUS:
            return ()
        given = given.split(",")
    gpus = tuple(str(each).strip() for each in given)
    for gpu in gpus:
        if not _GPU.fullmatch(gpu):
            raise MeshUsageError(
                f"--gpus: {gpu!r} is no GPU: number them from 0 like 0,2, or name UUIDs like "
                f"GPU-8932f937-..., or say `{NO_GPUS}`"
            )
    if len(set(gpus)) < len(gpus):
        raise MeshUsageError(f"--gpus {','.join(gpus)} names a GPU twice")
    return gpus
