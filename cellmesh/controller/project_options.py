"""Reads the options that a project sets for its meshes, in its ``pyproject.toml``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from ..errors import MeshUsageError
from .options import make_options
from .suggestion import did_you_mean


def read_project_options(start: Path) -> dict[str, Any]:
    """The ``[tool.cellmesh]`` table of the nearest ``pyproject.toml``.

    Args:
        start: the directory to begin at; its parents follow.

    Returns:
        Keyword arguments for `make_options`; empty where there is no such table.

    Raises:
        MeshUsageError: the file does not parse, or the table has a key that is no option.
    """
    for directory in (start, *start.parents):
        path = directory / "pyproject.toml"
        if path.is_file():
            break
    else:
        return {}
    import tomllib  # only where there is such a file

    try:
        tool = tomllib.loads(path.read_text()).get("tool", {})
        table = tool.get("cellmesh", {}) if isinstance(tool, dict) else tool
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise MeshUsageError(f"{path}: {e}") from e
    if not isinstance(table, dict):
        raise MeshUsageError(f"{path}: tool.cellmesh must be a table of options, not {table!r}")
    known = list(inspect.signature(make_options).parameters)
    for key in table:
        if key not in known:
            raise MeshUsageError(
                f"{path}: [tool.cellmesh] has {key!r}, which is no option "
                f"({', '.join(known)}){did_you_mean(key, known)}"
            )
    return dict(table)
