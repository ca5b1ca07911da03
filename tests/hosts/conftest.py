"""Several hosts in network namespaces; needs root, and fails without."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from cellmesh.controller.code_files import scan
from cellmesh.controller.session.launch import local
from tests.conftest import LEFTOVER_S, own_runtime_dir

from . import lender
from .netns import Host, hosts


@pytest.fixture(scope="session")
def machines() -> Iterator[list[Host]]:
    """Four hosts, on which `ssh` of this process starts commands."""
    assert os.getuid() == 0, "hosts in network namespaces need root: sudo make hosts"
    with hosts(4) as (made, path), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{path}:{os.environ['PATH']}")
        yield made


@pytest.fixture(scope="session", autouse=True)
def _checkout_is_not_sent() -> Iterator[None]:
    """Leave the checkout of cellmesh, which all hosts see at its path, out of what is sent."""
    user_roots = scan.user_roots

    def roots(sys_path: Iterable[str]) -> tuple[str, ...]:
        return tuple(root for root in user_roots(sys_path) if not os.path.isdir(f"{root}/cellmesh"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "user_roots", roots)
        yield


@pytest.fixture(scope="module", autouse=True)
def _lent(machines: list[Host], request: pytest.FixtureRequest) -> Iterator[None]:
    """In a module with `FORKS_AGENTS = True`, fork the agents of hosts from one process, and have
    no zygote import more than that has.
    """
    if not getattr(request.module, "FORKS_AGENTS", False):
        yield
        return
    with (
        pytest.MonkeyPatch.context() as patch,
        lender.lending([(host.directory, host.pid) for host in machines]),
    ):
        patch.setattr(local, "own_list", lambda: None)
        yield


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory of the notebook's host for one test."""
    with own_runtime_dir() as directory:
        yield directory


@pytest.fixture(autouse=True)
def _nothing_is_left(machines: list[Host]) -> Iterator[None]:
    yield
    for host in machines:
        host.mend()
    for host in machines:
        _, left = psutil.wait_procs(host.meshes(), timeout=LEFTOVER_S)
        assert not left, f"left on {host.name}: {left}"
        assert not list(host.directory.glob("run/cellmesh/*")), f"files are left on {host.name}"
