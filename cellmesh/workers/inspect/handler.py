"""Answers queries about values and names on a rank, or refuses them with a `Refusal`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ...wire.codec import Frame
from ...wire.inspect import (
    AnyRequest,
    Histogram,
    HistoryQuery,
    Names,
    Overview,
    Picture,
    Pixels,
    Refusal,
    ValueQuery,
    ValueSummary,
)
from ..rank.value_transfer import refusal
from . import downsample
from .chunks import histogram_of, readable
from .names import names
from .safe_read import reading
from .static_eval import NeedsCode, follow
from .summary import overview, tensor_at

if TYPE_CHECKING:
    from ..rank.features import RankContext


class InspectHandler:
    """Answers the queries about values and names on one rank.

    Args:
        context: context of the rank.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._shell = context.shell
        self._kept: tuple[str, Any] = ("", None)  # the last evaluated value, and its token

    def handle(self, request: AnyRequest, buffers: tuple[Frame, ...]) -> Any:
        """Answer a query on the main thread; see `rank.features.Handler`."""
        answer = self.answer(request, is_beside=False)
        # The expression may have stopped inside a collective, or in the middle of a step.
        if isinstance(answer, Refusal) and getattr(request, "runs", False):
            self._context.look_after_failure()
        return answer

    def handle_beside(self, request: AnyRequest) -> Any:
        """Answer a query on another thread than the main thread, which may begin to run a cell at
        any moment.
        """
        interrupts = self._context.interrupts
        num_begun, was_idle = interrupts.num_begun, interrupts.running < 0
        answer = self.answer(request, is_beside=True)
        nothing_ran = was_idle and interrupts.num_begun == num_begun
        if nothing_ran and isinstance(answer, ValueSummary | Pixels):
            return msgspec.structs.replace(answer, is_torn=False)
        return answer

    def answer(self, subject: AnyRequest, is_beside: bool) -> Any:
        """Return the answer to one query.

        Args:
            subject: the query.
            is_beside: whether this is another thread, while the main thread may be running: then
                nothing is evaluated.

        Returns:
            The answer (see `wire.inspect`), or a `Refusal` for any exception except a
            KeyboardInterrupt on the main thread, which is raised.
        """
        quiet = torch._C.DisableTorchFunctionSubclass() if is_beside else contextlib.nullcontext()
        try:
            with quiet:
                return self._answer(subject, is_beside)
        except NeedsCode as why:
            return Refusal("CellmeshError", _why_not(subject, why, is_beside), needs_code=True)
        except BaseException as error:
            if issubclass(type(error), KeyboardInterrupt) and not is_beside:
                raise
            return refusal(error)

    def _answer(self, subject: AnyRequest, is_beside: bool) -> Any:
        match subject:
            case Names():
                with reading(is_beside=True) as read:  # a rank may be busy
                    return names(self._shell, subject, read)
            case HistoryQuery():
                return self._context.groups.ledger.spans.past(subject)

        value = self._value(subject, is_beside)
        with reading(is_beside) as read:
            match subject:
                case Overview():
                    return overview(value, subject, read)
                case Picture():
                    return downsample.picture(value, subject, read)
                case Histogram(low=low, high=high, num_bins=num_bins):
                    data, _ = readable(tensor_at(value, subject.path, is_beside), is_beside)
                    return histogram_of(data, low, high, num_bins, read)

    def _value(self, subject: ValueQuery, is_beside: bool) -> Any:
        runs = isinstance(subject, Overview) and subject.runs and not is_beside
        if subject.token and not runs:
            token, value = self._kept
            if token == subject.token:
                return value
        try:
            return follow(subject.expression, self._shell.user_ns)
        except NeedsCode:
            if not runs:
                raise
        value = eval(
            compile(subject.expression.strip(), "<expression>", "eval"), self._shell.user_ns
        )
        self._kept = (subject.token, value)
        return value


make_handler = InspectHandler


def _why_not(subject: AnyRequest, why: NeedsCode, is_beside: bool) -> str:
    expression = getattr(subject, "expression", "")
    if getattr(subject, "token", "") and not getattr(subject, "runs", False):
        return f"the value of {expression!r} is no longer kept: inspect it again"
    if is_beside:
        return (
            f"the rank is busy, and {expression!r} would have to run code: {why}; while a cell "
            "runs, inspect names, attributes and constant indices only"
        )
    return f"{expression!r} would have to run code: {why}"
