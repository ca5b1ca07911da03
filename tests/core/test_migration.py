"""The tables of docs/from_monarch.md and docs/from_ray.md: each line that they claim is tested."""

from __future__ import annotations

from tests.support.migration import CHECKS, ELSEWHERE, ROOT, cells, line_of


def test_each_row_says_no_or_has_a_line_that_a_test_executes() -> None:
    lines = {cell: line_of(cell) for cell in cells()}
    assert len(lines) > 60
    assert [cell for cell, line in lines.items() if not line and not cell.startswith("no")] == []
    assert {line for line in lines.values() if line} == {*CHECKS, *ELSEWHERE}
    assert not CHECKS.keys() & ELSEWHERE.keys()


def test_tests_that_execute_other_lines_are_there() -> None:
    for test in ELSEWHERE.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
