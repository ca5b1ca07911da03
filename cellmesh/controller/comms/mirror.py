"""The state of one rank's widget as the notebook knows it, for pages that are loaded again; pure.

The state is JSON; binary values lie beside it, each with its path, as in ipywidgets' messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...wire.codec import Frame

# Of binary values that one model holds; of one with more, the rank is asked again.
MAX_BYTES = 64 << 20

Path = tuple[str | int, ...]


class Mirror:
    """A model's state.

    Args:
        state: as the rank opened it.
        paths: of the binary values.
        buffers: those.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        paths: Sequence[Sequence[str | int]],
        buffers: Sequence[Frame],
    ) -> None:
        self.state: dict[str, Any] = {}
        self._buffers: dict[Path, Frame] = {}
        self.is_whole = True
        self.update(state, paths, buffers)

    def update(
        self,
        state: Mapping[str, Any],
        paths: Sequence[Sequence[str | int]],
        buffers: Sequence[Frame],
    ) -> None:
        """Some of its values have changed."""
        names = {*state, *(str(path[0]) for path in paths)}
        for name in names:
            self.state.pop(name, None)
        self._buffers = {path: kept for path, kept in self._buffers.items() if path[0] not in names}
        self.state.update(state)
        self._buffers.update(
            (tuple(path), buffer) for path, buffer in zip(paths, buffers, strict=False)
        )
        if sum(len(memoryview(buffer).cast("B")) for buffer in self._buffers.values()) > MAX_BYTES:
            self._buffers.clear()
            self.is_whole = False

    def whole(self) -> tuple[dict[str, Any], list[Path], list[Frame]]:
        """State, paths and buffers."""
        return self.state, list(self._buffers), list(self._buffers.values())

    def entry(self) -> dict[str, Any]:
        """Itself, as a front end that asks for all models is told."""
        return {
            "model_name": self.state.get("_model_name", ""),
            "model_module": self.state.get("_model_module", ""),
            "model_module_version": self.state.get("_model_module_version", ""),
            "state": self.state,
        }
