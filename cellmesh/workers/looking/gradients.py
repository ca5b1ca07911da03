"""To be written."""

from __future__ import annotations

from typing import Any

from ...wire.looks import Gradient


def gradients(value: Any) -> tuple[Gradient, ...]:
    raise NotImplementedError
