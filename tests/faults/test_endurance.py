"""Each kind of `endurance`, repeated a few times."""

from __future__ import annotations

import pytest

from .endurance import KINDS, STARTS, run


@pytest.mark.parametrize("name", [*(kind.name for kind in KINDS), STARTS])
def test_a_kind_is_repeated_and_reported(name: str) -> None:
    text = run(name, 0.002)
    assert text.startswith(tuple("123456789"))
    assert "| controller |" in text
