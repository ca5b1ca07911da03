"""Shows the whole traceback of a rank, with the frames of libraries, on a click."""

from __future__ import annotations

from .fold import Trace
from .mime_bundle import pre
from .terminal import as_html

_SUMMARY = "cursor:pointer;font:11px monospace;opacity:.65;margin:2px 0"


def fold(trace: Trace) -> str:
    """Return the whole traceback as HTML that opens on a click."""
    return (
        f'<details><summary style="{_SUMMARY}">the traceback with the frames of libraries</summary>'
        f"{pre(as_html(trace.whole.rstrip()))}</details>"
    )
