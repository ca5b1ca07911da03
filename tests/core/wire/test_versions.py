"""Versions of hosts, compared."""

from __future__ import annotations

import pytest

from cellmesh.wire.host import Versions, describe_mismatch, own_versions

OWN = Versions("1.0", "3.11.4", "2.13.0", "2.27.3")


@pytest.mark.parametrize(
    "other",
    [
        OWN,
        Versions("1.0", "3.11.9", "2.13.0+cpu", "2.27.3"),
        Versions("1.0", "3.11.4", "2.13.0", ""),  # without GPUs
    ],
)
def test_hosts_that_fit_are_not_mentioned(other: Versions) -> None:
    assert describe_mismatch({"a": OWN, "b": other}) == ""


@pytest.mark.parametrize(
    ("other", "what", "text"),
    [
        (Versions("1.1", "3.11.4", "2.13.0"), "cellmesh", "a has 1.0, b has 1.1"),
        (Versions("1.0", "3.12.4", "2.13.0"), "Python", "a has 3.11.4, b has 3.12.4"),
        (Versions("1.0", "3.11.4", ""), "torch", "a has 2.13.0, b has none"),
        (Versions("1.0", "3.11.4", "2.13.0", "2.26.1"), "NCCL", "a has 2.27.3, b has 2.26.1"),
    ],
)
def test_hosts_that_differ_are_named_with_their_versions(
    other: Versions, what: str, text: str
) -> None:
    problem = describe_mismatch({"a": OWN, "b": other})
    assert problem.startswith(f"hosts differ in their {what}: {text}")


def test_nccl_is_compared_beside_hosts_without_it() -> None:
    bare, other = Versions("1.0", "3.11.4", "2.13.0"), Versions("1.0", "3.11.4", "2.13.0", "2.26.1")
    assert "b has 2.27.3, c has 2.26.1" in describe_mismatch({"a": bare, "b": OWN, "c": other})


def test_own_versions_fit_themselves() -> None:
    assert describe_mismatch({"a": own_versions(), "b": own_versions()}) == ""
