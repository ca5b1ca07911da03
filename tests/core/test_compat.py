"""What `make compat` selects: pytest refuses the whole run for one wrong name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.__main__ import ROOT, SELECTION


@pytest.mark.parametrize("line", Path(ROOT, SELECTION).read_text().splitlines())
def test_selection_names_tests_that_exist(line: str) -> None:
    path, _, test = line.partition("::")
    text = Path(ROOT, path).read_text()
    assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", text, re.MULTILINE)
