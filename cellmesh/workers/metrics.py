"""Collects the numbers that user code reports by ``cellmesh.log``, and sends them in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import MeshUsageError
from ..stdlib import threading, time
from ..wire.codec import Parcel
from ..wire.verbs import Logged
from .rank.value_transfer import is_dtensor

# How long points are collected, so that a fast loop sends few messages.
GATHER_S = 0.1
# Maximum number of points for each name in a message; others are left out.
MAX_POINTS = 500
_MAX_NAMES = 1000
_MAX_NAME = 200


class Reporter:
    """Sends the numbers that user code reports on one rank; usable on any thread.

    Args:
        send: sends a message, after the output printed before it.
        current_run: returns the run that the caller belongs to.
    """

    def __init__(self, send: Callable[[Parcel[Any]], None], current_run: Callable[[], int]) -> None:
        self._send = send
        self._current_run = current_run
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, str], list[tuple[float, float]]] = {}
        self._last_steps: dict[str, float] = {}
        self._sent_at = 0.0
        self._timer: threading.Timer | None = None

    def log(self, step: float | None, values: Mapping[str, Any]) -> None:
        """Queue one number for each name at one step; queued numbers are sent together.

        Args:
            step: the step; None for one more than the name's last step.
            values: name -> a number, or a tensor with one element.

        Raises:
            MeshUsageError: a value is no number, or names are too many or too long.
        """
        long = [name for name in values if len(name) > _MAX_NAME]
        if long or len(values) > _MAX_NAMES:
            what = f"a name of {len(long[0]):,} characters" if long else f"{len(values):,} names"
            raise MeshUsageError(
                f"cellmesh.log: {what}; log at most {_MAX_NAMES:,} names of {_MAX_NAME} "
                "characters at once"
            )
        numbers = {name: number_of(name, value) for name, value in values.items()}
        at = None if step is None else number_of("step", step)
        run = self._current_run()
        with self._lock:
            for name, number in numbers.items():
                last = self._last_steps.get(name, -1.0)
                here = last + 1 if at is None else at
                self._last_steps[name] = here
                points = self._waiting.setdefault((run, name), [])
                if here <= last:  # a loop that runs again starts a new curve
                    points.clear()
                points.append(
                    (here, number)
                )  # in one call, as an interrupt may come between any two
            if self._timer is not None:
                return
            # Send the first numbers after a pause at once.
            if time.monotonic() - self._sent_at > GATHER_S:
                self._flush()
                return
            self._timer = threading.Timer(GATHER_S, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Send all queued numbers."""
        if self._waiting or self._lock.locked():  # so that cells without numbers pay nothing
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        self._sent_at = time.monotonic()
        for verb in _as_messages(waiting):
            self._send(Parcel(verb))


def _as_messages(waiting: Mapping[tuple[int, str], list[tuple[float, float]]]) -> list[Logged]:
    """Return queued numbers as messages: one message for all names that a run has reported at the
    same steps.
    """
    grouped: dict[tuple[int, tuple[float, ...]], dict[str, tuple[float, ...]]] = {}
    for (run, name), points in waiting.items():
        if points:  # empty if an interrupt came before the first point
            steps, values = zip(*_thin(points), strict=True)
            grouped.setdefault((run, steps), {})[name] = values
    return [
        Logged(run, tuple(rows), steps, tuple(rows.values()))
        for (run, steps), rows in grouped.items()
    ]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most `MAX_POINTS` of the points, including the first, which may start a new curve,
    and the last.
    """
    last = len(points) - 1
    if last < MAX_POINTS:
        return points
    return [points[index * last // (MAX_POINTS - 1)] for index in range(MAX_POINTS)]


def number_of(name: str, value: Any) -> float:
    """Convert a reported value, a number or a tensor of one element, to a float.

    Raises:
        MeshUsageError: it is neither.
    """
    if is_dtensor(value):
        value = value.to_local()  # runs no collective, as a rank may log alone
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text")
        return float(value)
    except Exception as error:
        kind = type(value).__name__
        shape = getattr(value, "shape", None)
        what = kind if shape is None else f"{kind} of shape {tuple(shape)}"
        raise MeshUsageError(
            f"cellmesh.log({name}=...): {what} is no number; log a number, or a tensor with one "
            "element"
        ) from error
