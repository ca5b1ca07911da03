"""What is parsed while other threads parse."""

from __future__ import annotations

import pytest

from cellmesh.workers.rank.compiler import parse_again

DISTURBED = SystemError("AST constructor recursion depth mismatch (before=78, after=29)")


def parse_after(*errors: Exception) -> str:
    left = list(errors)

    def parse() -> str:
        if left:
            raise left.pop(0)
        return "tree"

    return parse_again(parse)


def test_disturbed_parse_is_done_again() -> None:
    assert parse_after(DISTURBED, DISTURBED) == "tree"


@pytest.mark.parametrize("error", [SyntaxError("x"), SystemError("other")])
def test_other_errors_are_raised(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        parse_after(error)


def test_parse_that_is_always_disturbed_ends() -> None:
    with pytest.raises(SystemError, match="mismatch"):
        parse_after(*[DISTURBED] * 100)
