"""What the process that starts a host's agent decides."""

from __future__ import annotations

import pytest

from cellmesh.wire.hosts import HostPart
from cellmesh.workers.agent.on_host import choose_address, is_engines


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RANK", True),
        ("MASTER_PORT", True),
        ("TORCHELASTIC_USE_AGENT_STORE", True),
        ("OMP_NUM_THREADS", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_variables_of_torchrun_are_kept_from_ranks(name: str, expected: bool) -> None:
    assert is_engines(name) == expected


PART = HostPart(0, 2, "n1", 0, 1, "")  # knows no address of the notebook: the route is the loopback
HERE, ELSEWHERE = "127.0.0.1", "10.9.9.9"


@pytest.mark.parametrize("launch", ["", "ssh -J gate {host} {command}", "/usr/bin/ssh {host}"])
def test_agent_has_the_address_that_the_notebooks_ssh_has_connected_to(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_interface = {"lo": [HERE], "mgmt": ["10.1.0.4"]}
    monkeypatch.setattr(
        "cellmesh.workers.agent.on_host.addresses_by_interface", lambda: by_interface
    )
    environment = {"SSH_CONNECTION": "10.1.1.1 5 10.1.0.4 22"}
    assert choose_address(PART, "", "", launch, environment) == ("10.1.0.4", "mgmt")
    assert choose_address(PART, HERE, "", launch, environment) == (HERE, "lo")


@pytest.mark.parametrize(
    ("launch", "dialled"),
    [
        ("", ELSEWHERE),  # of a container on the host, say
        ("srun --nodelist={host} {command}", ELSEWHERE),  # that of the login node
        ("srun --nodelist={host} {command}", "10.1.0.4"),
        ("hand", "10.1.0.4"),  # of a management network
        ("torchrun", "10.1.0.4"),
    ],
)
def test_agent_has_the_address_of_its_route_where_no_ssh_has_started_it(
    launch: str, dialled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_interface = {"lo": [HERE], "mgmt": ["10.1.0.4"]}
    monkeypatch.setattr(
        "cellmesh.workers.agent.on_host.addresses_by_interface", lambda: by_interface
    )
    environment = {"SSH_CONNECTION": f"10.1.1.1 5 {dialled} 22"}
    assert choose_address(PART, "", "", launch, environment) == (HERE, "lo")
