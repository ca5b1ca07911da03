"""Shows tracebacks of ranks: with a line for each run of frames of libraries, or whole."""

from __future__ import annotations

import sys

from .fold import Trace
from .mime_bundle import pre
from .terminal import as_html

_SUMMARY = "cursor:pointer;font:11px monospace;opacity:.65;margin:2px 0"


def text_of(trace: Trace) -> str:
    """Return the traceback to show: the whole one after ``%xmode Verbose`` in the notebook."""
    interactive = sys.modules.get("IPython.core.getipython")
    shell = interactive.get_ipython() if interactive is not None else None
    is_verbose = getattr(getattr(shell, "InteractiveTB", None), "mode", "") == "Verbose"
    return trace.whole if is_verbose and trace.whole else trace.traceback


def fold(trace: Trace) -> str:
    """Return the whole traceback as HTML that opens on a click."""
    return (
        f'<details><summary style="{_SUMMARY}">the traceback with the frames of libraries</summary>'
        f"{pre(as_html(trace.whole.rstrip()))}</details>"
    )
