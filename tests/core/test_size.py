"""The sizes of features, their budgets, and how lines are counted (`tests/size.py`)."""

from __future__ import annotations

import sys

import pytest

from tests import size
from tests.size import (
    FEATURES,
    Feature,
    feature_of,
    problems,
    python_code_lines,
)

MODULE = '''
"""A module."""

import os
from sys import (
    argv,
)


class Thing:
    """A class.

    With more to say.
    """

    def go(self) -> str:
        """A method."""
        import json  # in a function

        text = """
        two of these lines

        are no comments
        """
        # a comment
        return json.dumps(
            text,
        )
'''


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ("x = 1\n\n\ny = (\n    2,\n)\n", 4),
        (MODULE, 10),
        ('x = {\n    "a": 1,  # why\n    # why not\n}\n', 3),
    ],
)
def test_code_lines_of_python(source: str, count: int) -> None:
    assert python_code_lines(source) == count


TWO = (Feature("inspector", 100, "inspect/ wire/inspect.py"), Feature("messages", 100, "wire/"))


@pytest.mark.parametrize(
    ("path", "name"),
    [("inspect/tree.py", "inspector"), ("wire/inspect.py", "inspector"), ("wire/a.py", "messages")],
)
def test_the_longest_path_decides(path: str, name: str) -> None:
    feature = feature_of(path, TWO)
    assert feature is not None
    assert feature.name == name


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"wire/a.py": 105, "inspect/a.py": 1}, []),
        ({"wire/a.py": 106}, ["messages has 106 code lines, over its budget of 100"]),
        ({"new.py": 1}, ["new.py belongs to no feature"]),
    ],
)
def test_problems(files: dict[str, int], expected: list[str]) -> None:
    found = list(problems(files, TWO))
    assert len(found) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(found, expected, strict=True))


def test_no_feature_is_over_its_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["size"])
    status = size.main()
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert all(feature.name in printed.out for feature in FEATURES)
    assert "import circles of files" in printed.out


def test_a_feature_over_its_budget_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["size"])
    monkeypatch.setattr(size, "files_of", lambda: {"cli/doctor.py": 1_000_000})
    assert size.main() == 1
    assert "doctor has 1000000 code lines" in capsys.readouterr().err
