"""What hosts of a mesh have agreed on."""

from __future__ import annotations

from cellmesh.wire.hosts import HEARTBEAT_S, SILENT_S

# Within which a host that is not heard is to be reported.
REPORTED_S = 3.0


def test_host_that_is_not_heard_is_noticed_in_time() -> None:
    """Also one that sends and hears nothing: the notice takes an interval more."""
    assert SILENT_S + 2 * HEARTBEAT_S < REPORTED_S
    assert SILENT_S > 3 * HEARTBEAT_S  # heartbeats that are lost or late cost no connection
