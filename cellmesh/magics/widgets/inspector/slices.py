"""Gets pictures and elements of a tensor for the inspector: of one rank, or a difference of two."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ....controller.inspect.replica_diff import exact
from ....controller.inspect.source import InspectionSource
from ....wire.inspect import Element, Picture, Pixels
from .view_model import number

# A side of a picture: 4 bytes each make less than a megabyte.
MAX_PIXELS = 496
# A side of the picture that is shown where there is no widget.
_SMALL = 128


def ask_picture(answers: InspectionSource, content: Mapping[str, Any]) -> Pixels | str:
    """Return the picture of a tensor that the front end asks for, or why there is none.

    Args:
        answers: who is asked.
        content: ``path``, ``rank``, ``minus`` (a rank, or None), ``dims``, ``index`` (a number for
            each dim, those of `dims` not regarded), ``rows``, ``cols``, ``height``, ``width``,
            ``reduction``.
    """
    dims = (int(content["dims"][0]), int(content["dims"][1]))
    subject = Picture(
        answers.expression,
        str(content["path"]),
        tuple(int(at) for dim, at in enumerate(content["index"]) if dim not in dims),
        dims,
        (int(content["rows"][0]), int(content["rows"][1])),
        (int(content["cols"][0]), int(content["cols"][1])),
        min(int(content["height"]), MAX_PIXELS),
        min(int(content["width"]), MAX_PIXELS),
        content["reduction"],
    )
    found = _of_ranks(answers, subject, content)
    if isinstance(found, str):
        return found
    return found[0] if len(found) == 1 else _difference(*found)


def as_message(pixels: Pixels) -> tuple[dict[str, Any], list[bytes]]:
    """Return a picture as a message to the front end, with the numbers in a buffer."""
    height, width = pixels.values.shape
    content = {
        "height": height,
        "width": width,
        "low": number(pixels.low),
        "high": number(pixels.high),
        "is_exact": pixels.is_exact,
        "is_torn": pixels.is_torn,
        "is_sampled": pixels.is_sampled,
    }
    return content, [pixels.values.astype("<f4").tobytes()]


def ask_element(answers: InspectionSource, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return one exact element of a tensor: its ``text``, or the ``error``."""
    index = tuple(int(at) for at in content["index"])
    found = _of_ranks(answers, Element(answers.expression, str(content["path"]), index), content)
    if isinstance(found, str):
        return {"error": found}
    return {"text": found[0] if len(found) == 1 else subtract(found)}


def small_picture(answers: InspectionSource, path: str, detail: Mapping[str, Any]) -> Pixels | None:
    """Return a small picture of the last two dims on the first rank that has one; None if none
    has.

    Args:
        answers: who is asked.
        path: which tensor.
        detail: what is known of it (`sheets.detail`).
    """
    for rank, part in detail.get("parts", {}).items():
        if part["is_drawable"]:
            shape: Sequence[int] = part["shape"]
            rows, cols = (1, *shape)[-2:]
            content = {
                "path": path,
                "rank": rank,
                "dims": (len(shape) - 2 if len(shape) > 1 else -1, len(shape) - 1),
                "index": (0,) * len(shape),
                "rows": (0, rows),
                "cols": (0, cols),
                "height": min(rows, _SMALL),
                "width": min(cols, _SMALL),
                "reduction": "mean",
            }
            found = ask_picture(answers, content)
            return None if isinstance(found, str) else found
    return None


def subtract(texts: Sequence[str]) -> str:
    """Return the difference of two elements, given as exact texts, with both texts."""
    one, other = texts
    difference = "equal" if one == other else "not equal"  # bools
    for kind in (int, float, complex):
        with contextlib.suppress(ValueError):
            value = kind(one) - kind(other)
            difference = f"{value:.9g}" if kind is float else str(value)
            break
    return f"{difference} ({one} − {other})"


def _of_ranks(
    answers: InspectionSource, subject: Picture | Element, content: Mapping[str, Any]
) -> list[Any] | str:
    """Return a query's answers of one rank and of the rank to subtract, or why one is missing."""
    ranks = [int(content["rank"])]
    if content.get("minus") is not None:
        ranks.append(int(content["minus"]))
        subject = msgspec.structs.replace(subject, exactly=True)
    looked = answers.look(subject, ranks)
    for rank in ranks:
        if rank not in looked.answers:
            return f"rank {rank}: {looked.refusals.get(rank, 'did not answer')}"
    return [looked.answers[rank] for rank in ranks]


def _difference(one: Pixels, other: Pixels) -> Pixels | str:
    import numpy as np

    if one.values.shape != other.values.shape:
        return f"{one.values.shape} and {other.values.shape} cannot be subtracted"
    largest = np.finfo(np.float32).max
    with np.errstate(invalid="ignore", over="ignore"):
        exactly = exact(one.values) - exact(other.values)
        limited = np.where(np.isfinite(exactly), np.clip(exactly, -largest, largest), exactly)
        values = limited.astype(np.float32)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    is_torn, is_sampled = one.is_torn or other.is_torn, one.is_sampled or other.is_sampled
    return Pixels(values, low, high, one.is_exact and other.is_exact, is_torn, is_sampled)
