"""Checks the options of a start, and reads the defaults that a project sets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack, cast, get_args, get_origin, get_type_hints

from ..errors import HostError, MeshUsageError, did_you_mean
from ..wire.environment import SET_BY_MESH, VISIBLE
from ..wire.hosts import Host
from ..wire.mesh_dims import DEFAULT_DIM, check_mesh, parse_mesh
from ..wire.options import Duration, MeshOptions, StartOptions, Switch
from ..wire.own_file import Secret
from .host_list import choose_hosts

MAX_RANKS = 1024
_MAX_SPAN_S = 365 * 86400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Options(MeshOptions, frozen=True, kw_only=True):
    """The checked options for the start of a mesh.

    Attributes:
        num_ranks: number of ranks.
        mesh: DeviceMesh dims, name -> size; their product is `num_ranks`. Empty without a process
            group.
        prestart: whether the ranks may be forked from the notebook's waiting zygote.
        hosts: hosts of the mesh, with their numbers of ranks; () for this host only.
        learns: whether a zygote imports what the project's ranks have imported.
        command: command line that starts the agents of all hosts; "" if each host has its own.
        sync: whether to copy the user's modules to all hosts.
    """

    num_ranks: int
    mesh: Mapping[str, int]
    prestart: bool = True
    hosts: tuple[Host, ...] = ()
    command: str = ""
    sync: bool = True
    learns: bool = True


def working_directory() -> Path:
    """Return the working directory of this process, in which ranks begin.

    Raises:
        HostError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise HostError(
            "the working directory of this process was removed, and ranks begin in it: change to "
            "another (`cd`, `%cd ~`, os.chdir), or make it again and change to it"
        ) from error


def find_project(start: Path) -> Path | None:
    """Return the nearest directory with a ``pyproject.toml``, among this one and its parents."""
    places = (start, *start.parents)
    return next((place for place in places if (place / "pyproject.toml").is_file()), None)


def read_project_options(start: Path) -> dict[str, Any]:
    """Read the ``[tool.cellmesh]`` table of the nearest ``pyproject.toml``.

    Args:
        start: directory in which the search begins; it continues in the parents.

    Returns:
        Keyword arguments for `make_options`; empty without such a table.

    Raises:
        MeshUsageError: the file does not parse, or the table has a key that is not an option.
    """
    project = find_project(start)
    if project is None:
        return {}
    path = project / "pyproject.toml"
    import tomllib  # only if there is such a file

    try:
        tool = tomllib.loads(path.read_text()).get("tool", {})
        table = tool.get("cellmesh", {}) if isinstance(tool, dict) else tool
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise MeshUsageError(f"{path}: {e}") from e
    if not isinstance(table, dict):
        raise MeshUsageError(f"{path}: tool.cellmesh must be a table of options, not {table!r}")
    _check_names(table, f"{path}: [tool.cellmesh] has ")
    return dict(table)


def _check_names(names: Iterable[str], where: str) -> None:
    known = ["num_ranks", *StartOptions.__annotations__]
    for name in names:
        if name not in known:
            raise MeshUsageError(
                f"{where}{name!r}, which is no option ({', '.join(known)})"
                f"{did_you_mean(name, known)}"
            )


def make_options(num_ranks: Any = None, **given: Unpack[StartOptions]) -> Options:
    """Check the options that a user gave, and fill in defaults.

    Args:
        num_ranks: number of ranks; None for the product of the mesh's dims.
        given: the other options.

    Raises:
        MeshUsageError: an option or its value is invalid.
    """
    _check_names(given, "a start was given ")
    kinds = get_type_hints(StartOptions)
    checked = cast(StartOptions, {key: _check(key, kinds[key], given[key]) for key in given})  # type: ignore[literal-required]
    dims = _read_dims(given.get("mesh"))
    if num_ranks is None and dims:
        num_ranks = math.prod(check_mesh(dims, None).values())
    hosts, command = choose_hosts(checked, num_ranks)
    num_ranks = sum(host.num_ranks for host in hosts) if hosts else num_ranks
    num_ranks = check_num_ranks(num_ranks, "say how many, like 8")
    has_group = checked.get("group", True)
    if not has_group and (num_ranks > 1 or dims or hosts):
        raise MeshUsageError(
            "without a process group a mesh has one rank, on this host, and no dims: `%dist_start "
            "1 --group off`; more such ranks are more meshes, each with a --name"
        )
    fields: dict[str, Any] = {
        key: value for key, value in checked.items() if key in Options.__struct_fields__
    }
    return Options(
        **fields
        | {
            "num_ranks": num_ranks,
            "mesh": check_mesh(dims or {DEFAULT_DIM: num_ranks}, num_ranks) if has_group else {},
            "preload": _read_modules(given.get("preload", ())),
            "learns": "preload" not in given or bool(given["preload"]),
            "name": _check_name(given.get("name", "")),
            "is_lease_chosen": "lease_s" in given,
            "env": read_environment(given.get("env", ()), os.environ),
            "hosts": hosts,
            "gpus": read_gpus(given["gpus"]) if "gpus" in given else None,
            "command": command,
        }
    )


def check_num_ranks(num_ranks: Any, remedy: str) -> int:
    """Check the number of ranks of a mesh, and return it.

    Args:
        num_ranks: the number that the user gave.
        remedy: end of the error message if it is not an integer.

    Raises:
        MeshUsageError: `num_ranks` is not an integer, or is out of range.
    """
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise MeshUsageError(
            f"the number of ranks must be a whole number, not {num_ranks!r}: {remedy}"
        )
    if not 1 <= num_ranks <= MAX_RANKS:
        raise MeshUsageError(f"the number of ranks must be 1 to {MAX_RANKS}, not {num_ranks}")
    return num_ranks


def parse_duration(text: str) -> float:
    """Parse a duration such as ``30m``, ``2h`` or ``0``.

    Args:
        text: ``30m``, ``1.5h``, ``90s`` or a number of seconds.

    Returns:
        The duration in seconds.

    Raises:
        MeshUsageError: the text does not have that form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|d)?", text.strip())
    if not found:
        raise MeshUsageError(f"{text!r} is no span of time: write it like 30m, 2h or 90 (seconds)")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def _check(option: str, kind: Any, value: Any) -> Any:
    """Check the value of an option of a simple type, and return it; options of other types are
    checked by their own functions.
    """
    if kind == Duration:
        return _check_duration(option, value)
    if kind in (bool, Switch):
        value = {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise MeshUsageError(f"{option} must be true or false, not {value!r}")
    elif kind is str and not isinstance(value, str):
        raise MeshUsageError(f"{option} must be text, not {value!r}")
    elif kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise MeshUsageError(f"{option} must be a whole number, not {value!r}")
    elif get_origin(kind) is Literal and value not in (words := get_args(kind)):
        among = " or ".join((", ".join(words[:-1]), words[-1]))
        near = did_you_mean(str(value), words)
        raise MeshUsageError(f"{option} must be {among}, not {value!r}{near}")
    return value


def _check_duration(option: str, value: Any) -> float:
    seconds = parse_duration(value) if isinstance(value, str) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _MAX_SPAN_S:
        raise MeshUsageError(
            f"{option} must be a span of time, in seconds or like 30m, at most a year, and not "
            f"{value!r}"
        )
    return float(seconds)


def _read_dims(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if not isinstance(mesh, Mapping | None):
        raise MeshUsageError(
            f"mesh must be text like dp=2,tp=4 or a mapping of names to sizes, not {mesh!r}"
        )
    return dict(mesh or {})


def _read_modules(preload: Any) -> tuple[str, ...]:
    if not isinstance(preload, str | list | tuple | set | frozenset):
        raise MeshUsageError(f"preload must be text or a list of modules, not {preload!r}")
    names = preload.split(",") if isinstance(preload, str) else map(str, preload)
    modules = tuple(name.strip() for name in names if name.strip())
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise MeshUsageError(f"--preload {module!r} is no module's name")
    return modules


def _check_name(name: str) -> str:
    if name and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,39}", name):
        raise MeshUsageError(
            f"{name!r} is no name: letters, digits, _ and -, which is not the first, at most 40"
        )
    return name


_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F-]+")
NO_GPUS = "none"


def read_environment(
    given: Mapping[str, str] | Iterable[str] | str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables to set on the ranks.

    Args:
        given: name -> value; or texts, each ``NAME`` for the notebook's value or ``NAME=value``.
        environment: environment of the notebook.

    Returns:
        Name -> value.

    Raises:
        MeshUsageError: a name is invalid, is not set in the notebook, or is set by the mesh itself;
            or the values are invalid.
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
        if not isinstance(value, str) or "\0" in value:  # not shown, as it may be a secret
            raise MeshUsageError(f"--env {name}: the value of {name} must be text without NULs")
        chosen[name] = Secret(value)
    return chosen


def _is_no_environment(given: object) -> MeshUsageError:
    return MeshUsageError(
        f"env must be names, or names and values, like ['HF_HOME'] or {{'HF_HOME': '/data'}}, and "
        f"not of type {type(given).__name__}"
    )


def read_gpus(given: Any) -> tuple[str, ...]:
    """Parse the GPUs that the ranks of each host use.

    Args:
        given: ``0,2`` or ``none``; or a list, or one number.

    Raises:
        MeshUsageError: the value does not have that form.
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
    return gpus
