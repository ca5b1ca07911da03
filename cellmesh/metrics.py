"""Lets user code report numbers while it runs (`log`), for live plots."""

from __future__ import annotations

import sys
from typing import Any


def log(*, step: float | None = None, **values: Any) -> None:
    """Report numbers from a rank, for ``%dist_plot`` and ``mesh.plot``; anywhere else, do nothing.

    Cheap (gathered, and sent a few times a second), and no collective: ranks may report different
    things at different times. A tensor's number is read at once, which on a GPU waits for it.

    Args:
        step: the x of these points; None for one more than each name's last.
        values: name -> a number, or a tensor with one element.

    Raises:
        MeshUsageError: a value is no number.
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    report = getattr(shell, "report_numbers", None)
    if report is not None:
        report(step, values)
