"""A user at the keyboard of the process that holds the mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Answer = str | type[BaseException] | Callable[[], str]


class Typist:
    """Stands in for ``input()`` and ``getpass()`` of this process; types what it was given, in
    order.

    Args:
        answers: what to type; an exception is raised, a function called.
    """

    def __init__(self, *answers: Answer) -> None:
        self._left = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str = "") -> str:
        self.prompts.append(prompt)
        assert self._left, f"nobody expected to be asked {prompt!r}"
        answer = self._left.pop(0)
        if isinstance(answer, str):
            return answer
        if isinstance(answer, type):
            raise answer
        return answer()

    def sit_down(self, monkeypatch: pytest.MonkeyPatch) -> Typist:
        """Take over the keyboard."""
        monkeypatch.setattr("builtins.input", self)
        monkeypatch.setattr("getpass.getpass", self)
        return self
