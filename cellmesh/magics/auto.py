"""``%dist_auto on``: an input transformer that sends plain cells to the ranks."""

from __future__ import annotations

from collections.abc import Callable

# The cell magic that auto mode puts before a cell; not for people.
AUTO_MAGIC = "_dist_auto_cell"


def make_transformer(is_on: Callable[[], bool]) -> Callable[[list[str]], list[str]]:
    """An IPython input transformer (for ``input_transformers_cleanup``).

    Args:
        is_on: whether auto mode is on now.
    """

    def send_to_ranks(lines: list[str]) -> list[str]:
        if not is_on() or stays_here(lines):
            return lines
        return [f"%%{AUTO_MAGIC}\n", *lines]

    return send_to_ranks


def stays_here(lines: list[str]) -> bool:
    """Whether a cell runs in the notebook's own process even in auto mode.

    Those do: empty cells, ``%%dist``, ``%%dist_profile`` and ``%%local``, help (``x?``), and cells that
    begin with one of our line magics or with what manages extensions.
    """
    stripped = (line.strip() for line in lines)
    first = next((line for line in stripped if line and (not line.startswith("#"))), "")
    if not first:
        return True
    if first.startswith("%%"):
        return first.split()[0] in ("%%dist", "%%dist_profile", "%%local", f"%%{AUTO_MAGIC}")
    return first.startswith(("%dist_", "%load_ext", "%reload_ext", "%unload_ext", "?")) or first.endswith("?")


def magics_inside(source: str) -> list[str]:
    """Our line magics in a cell meant for the ranks, where there are none."""
    words = (line.split()[0] for line in source.splitlines() if line.strip())
    return [word for word in words if word.startswith("%dist_")]
