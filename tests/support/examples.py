"""Numbers of examples of property tests, which the profile that runs raises for all of them."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> settings:
    """Settings with this many examples of the repeatable profile's 100, and with as many times more
    as the running profile has.
    """
    return settings(max_examples=number * settings.default.max_examples // 100)
