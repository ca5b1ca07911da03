"""Blocks of folded output, and a stand-in for the front end that shows them."""

from __future__ import annotations

import json
from typing import Any

from cellmesh.controller.output.fold import (
    Block,
    Line,
    Rich,
    Trace,
)


def line(*ranks: int, text: str = "text", stream: Any = "stdout") -> Block:
    return Block(ranks, Line(stream, text))


def rich(
    *ranks: int, kind: Any = "display", ids: tuple[str, ...] = (), metadata: Any = None, **data: Any
) -> Block:
    keys = {"plain": "text/plain", "html": "text/html", "png": "image/png", "svg": "image/svg+xml"}
    keys |= {"latex": "text/latex", "markdown": "text/markdown", "json": "application/json"}
    bundle = {"data": {keys[key]: value for key, value in data.items()}, "metadata": metadata or {}}
    return Block(ranks, Rich(kind, json.dumps(bundle).encode()), ids or ("",) * len(ranks))


def clear(*ranks: int, wait: bool = False) -> Block:
    return Block(ranks, Rich("clear", b"wait" if wait else b""), ("",) * len(ranks))


TRACE = Trace("ValueError", "no", "Traceback (most recent call last)\n  line 1\nValueError: no\n")


class Recorder:
    """Stands in for a front end: applies messages to an output area, as Jupyter does."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, content: dict[str, Any]) -> None:
        json.dumps(content)  # it must be able to travel
        self.messages.append((kind, content))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]

    @property
    def area(self) -> list[Any]:
        """What stands in the output area: texts, and the data of displays in their latest state."""
        area: list[Any] = []
        places: dict[str, int] = {}
        for kind, content in self.messages:
            display_id = content.get("transient", {}).get("display_id")
            if kind == "clear_output":
                area.clear()
                places.clear()
            elif kind == "stream":
                area.append(content["text"])
            elif kind == "error":
                area.append(content["ename"])
            elif kind == "update_display_data":
                area[places[display_id]] = content["data"]
            else:
                assert kind == "display_data"
                if display_id:
                    places[display_id] = len(area)
                area.append(content["data"])
        return area
