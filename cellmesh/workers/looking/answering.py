"""Answers one look; what cannot be told comes as a `Refusal`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import CellmeshError
from ...wire.looks import (
    AnySubject,
    Complete,
    Digests,
    Element,
    Explain,
    Gradients,
    Histogram,
    History,
    Names,
    Overview,
    Picture,
    Refusal,
    Sample,
)
from ..inspection import is_quiet
from ..shell import RankShell
from ..spans import Spans


@dataclass(frozen=True)
class Looker:
    """Looks at what a rank has.

    Args:
        shell: its namespace is the rank's.
        spans: what the rank did lately.
    """

    shell: RankShell
    spans: Spans

    def answer(self, subject: AnySubject, is_beside: bool) -> Any:
        """Look at something.

        Args:
            subject: what.
            is_beside: on another thread, while the main thread may be running.

        Returns:
            The answer (see `looks`), or a `Refusal`. KeyboardInterrupt passes through.
        """
        try:
            return self._answer(subject, is_beside)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Refusal(type(error).__name__, _text_of(error))

    def _answer(self, subject: AnySubject, is_beside: bool) -> Any:
        match subject:  # these have to be quick, also the first time
            case Complete():
                from . import completing

                return completing.complete(self.shell, subject)
            case Explain():
                from . import explaining

                return explaining.explain(self.shell, subject)
            case Names():
                from . import names

                return names.names(self.shell, subject)

        from . import gradients, pictures, values  # rarely used

        evaluate = self._evaluate_quietly if is_beside else self._evaluate
        match subject:
            case Overview():
                return values.overview(evaluate(subject.expression), subject, is_beside)
            case Histogram():
                return values.histogram(evaluate(subject.expression), subject, is_beside)
            case Picture():
                return pictures.picture(evaluate(subject.expression), subject, is_beside)
            case Element():
                return pictures.element(evaluate(subject.expression), subject, is_beside)
            case Gradients():
                return gradients.gradients(evaluate(subject.expression), is_beside)
            case Digests():
                return values.digests(evaluate(subject.expression), subject, is_beside)
            case Sample():
                return values.sample(evaluate(subject.expression), subject, is_beside)
            case History():
                return self.spans.past(subject)

    def _evaluate(self, expression: str) -> Any:
        return eval(compile(expression.strip(), "<expression>", "eval"), self.shell.user_ns)

    def _evaluate_quietly(self, expression: str) -> Any:
        if not is_quiet(expression):
            raise CellmeshError(
                f"the rank is busy, and {expression!r} would have to run code: while a cell runs, inspect "
                "names, attributes and indices only"
            )
        return self._evaluate(expression)


def _text_of(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:10_000]
    except Exception as e:
        return f"<its str() raised {type(e).__name__}>"
