"""Controllers that an agent has sent away."""

from __future__ import annotations

from cellmesh.workers.agent.controller_port import Dismissals


def test_dismissals_are_known_by_link_and_the_oldest_is_forgotten() -> None:
    seen = Dismissals()
    for number in range(101):
        seen.note(bytes([number]), f"reason {number}")
    assert seen.why(b"x" * 16) == ""
    assert seen.why(bytes([0])) == ""
    assert [seen.why(bytes([number])) for number in (1, 100)] == ["reason 1", "reason 100"]
