"""Decides which cells run on ranks; with ``%dist_auto on``, an input transformer also sends plain
cells to ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

# The cell magic that auto mode puts before a cell; internal.
AUTO_MAGIC = "_dist_auto_cell"


# IPython's magics that run the rest of a cell unchanged may precede cellmesh's.
_AROUND = r"(?:\s*%%(?:time|timeit|prun|capture)(?!\w)[^\n]*\n)*"
_CELL = re.compile(_AROUND + r"\s*%%(dist|dist_profile)(?!\w)([^\n]*)\n")
_HELP = re.compile(
    r"\s*(?P<before>\?{0,2})\s*(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*|\[[^\[\]\n]*\])*)\s*(?P<after>\?{0,2})\s*\Z"
)


@dataclass(frozen=True)
class CellForRanks:
    """The source of a cell that runs on ranks, and the ranks that it runs on.

    Attributes:
        source: source that the ranks run.
        begin: offset of the source in the cell, in characters.
        magic: name of the magic that sends it to ranks; "" in auto mode.
        line: options of the magic.
    """

    source: str
    begin: int = 0
    magic: str = ""
    line: str = ""


def read_cell(code: str, is_auto: bool) -> CellForRanks | None:
    """Return a cell in the form that ranks receive; None if it runs in the notebook's own process.

    Args:
        code: source of the cell as typed.
        is_auto: whether auto mode is on.
    """
    match = _CELL.match(code)
    if match is not None:
        return CellForRanks(code[match.end() :], match.end(), match[1], match[2].strip())
    return CellForRanks(code) if is_auto and not stays_here(code.splitlines()) else None


def read_help(source: str) -> tuple[str, int] | None:
    """Return the name and the detail (0, 1) of the help that a cell requests (``x?``, ``??x``);
    None if the cell does anything else.
    """
    match = _HELP.match(
        "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#"))
    )
    if match is None or bool(match["before"]) == bool(match["after"]):
        return None
    return match["name"], len(match["before"] or match["after"]) - 1


def make_transformer(is_on: Callable[[], bool]) -> Callable[[list[str]], list[str]]:
    """Return an IPython input transformer that sends plain cells to ranks while auto mode is on.

    Args:
        is_on: returns whether auto mode is on.
    """

    def send_to_ranks(lines: list[str]) -> list[str]:
        if not is_on() or stays_here(lines):
            return lines
        return [f"%%{AUTO_MAGIC}\n", *lines]

    # Makes `check_complete`, by which a terminal decides whether Enter runs a cell, examine the
    # cell as typed: a cell magic would need an empty line.
    send_to_ranks.has_side_effects = True  # type: ignore[attr-defined]
    return send_to_ranks


def stays_here(lines: list[str]) -> bool:
    """Return whether a cell runs in the notebook's own process even in auto mode.

    This applies to empty cells, ``%%dist``, ``%%dist_profile`` and ``%%local``, help for magics
    (``%x?``), searches (``x*?``), and cells that begin with one of our line magics or with a magic
    that manages extensions. Magics such as ``%%time`` and ``%%capture`` run where the rest of their
    cell runs.
    """
    around = re.match(_AROUND, "\n".join(line.rstrip("\n") for line in lines))
    if around is not None and (below := around.string[around.end() :].strip()):
        lines = below.split("\n")
    if read_help("\n".join(lines)) is not None:
        return False
    stripped = (line.strip() for line in lines)
    first = next((line for line in stripped if line and (not line.startswith("#"))), "")
    if not first:
        return True
    if first.startswith("%%"):
        return first.split()[0] in ("%%dist", "%%dist_profile", "%%local", f"%%{AUTO_MAGIC}")
    return first.startswith(
        ("%dist_", "%load_ext", "%reload_ext", "%unload_ext", "?")
    ) or first.endswith("?")


def magics_inside(source: str) -> list[str]:
    """Return cellmesh's line magics in a cell for ranks, which do not have these magics."""
    words = (line.split()[0] for line in source.splitlines() if line.strip())
    return [word for word in words if word.startswith("%dist_")]
