"""To be written."""

from __future__ import annotations

from typing import Any

from ...wire.looks import Element, Picture, Pixels


def picture(value: Any, subject: Picture, is_torn: bool) -> Pixels:
    raise NotImplementedError


def element(value: Any, subject: Element) -> str:
    raise NotImplementedError
