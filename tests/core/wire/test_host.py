"""Facts about hosts: their processes, versions and GPUs, and how they are invited."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from cellmesh.errors import HostError
from cellmesh.wire.environment import choose_gpus
from cellmesh.wire.host import (
    Place,
    Versions,
    describe_mismatch,
    is_process,
    started_ticks,
    this_place,
)
from cellmesh.wire.hosts import HEARTBEAT_S, SILENT_S, Invitation, own_facts, parse_invitation
from cellmesh.wire.marks import is_dead
from cellmesh.workers import linux_process
from tests.conftest import run_python

from ...support.tickets import make_ticket


@pytest.mark.parametrize("is_imported", [True, False])
def test_the_version_of_torch_is_known_before_it_is_imported(is_imported: bool) -> None:
    code = f"""
import sys
if {is_imported}: import torch
from cellmesh.wire.host import own_torch
version = own_torch()
assert ("torch" in sys.modules) == {is_imported}
import torch
assert version == torch.__version__, version
sys.modules.pop("torch")
sys.path[:] = []
assert own_torch() == ""
"""
    done = run_python("-c", code, check=False)
    assert not done.stderr


def test_a_process_that_has_ended_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = started_ticks(process.pid)
    assert is_process(process.pid, ticks)
    assert not is_process(process.pid, ticks + 1), "a later process with its number"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_process(process.pid, ticks), "what is to be reaped still has its number"
    process.communicate()
    assert started_ticks(process.pid) == 0


@pytest.mark.parametrize("name", [b"\xe9t\xe9", b") R 1 (\n"])
def test_a_process_may_have_any_bytes_as_its_name(name: bytes) -> None:
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_process(process.pid, started_ticks(process.pid))
        assert process.pid in linux_process.descendants(os.getpid())
        process.kill()


def test_only_a_mesh_of_this_place_is_known_to_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ended = {"agent_pid": process.pid, "agent_ticks": started_ticks(process.pid) or 1}
    here = this_place()
    assert is_dead(make_ticket(place=here, **ended))
    assert not is_dead(make_ticket(place=Place("other", here.boot, here.pid_namespace), **ended))
    living = {"agent_pid": os.getpid(), "agent_ticks": started_ticks(os.getpid())}
    assert not is_dead(make_ticket(place=here, **living))


# Within which a host that is not heard is to be reported.
REPORTED_S = 3.0


def test_host_that_is_not_heard_is_noticed_in_time() -> None:
    """Also one that sends and hears nothing: the notice takes an interval more."""
    assert SILENT_S + 2 * HEARTBEAT_S < REPORTED_S
    assert SILENT_S > 3 * HEARTBEAT_S  # heartbeats that are lost or late cost no connection


INVITATION = Invitation("train", "tcp://10.0.0.1:4711", "p" * 40, "s" * 40)
TEXT = msgspec.json.encode(INVITATION)


def test_invitation_is_read_back_and_other_texts_are_none() -> None:
    assert parse_invitation(TEXT + b"\n") == INVITATION
    for text in (b"", b"hello", b'"endpoint"', b'{"key": "1", "endpoint": "x"}'):
        assert parse_invitation(text) is None


def test_damaged_invitation_is_refused_without_its_secret() -> None:
    with pytest.raises(HostError, match="the ticket is damaged") as raised:
        parse_invitation(TEXT.replace(b"sss", b"s", 1))
    assert "s" * 30 not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, -1),
        ({"GROUP_RANK": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, 3),
        ({"GROUP_RANK": "first"}, -1),
    ],
)
def test_engines_number_hosts(environment: dict[str, str], number: int) -> None:
    facts = own_facts(environment)
    assert facts.number == number
    assert not any(address.startswith("127.") for address in facts.addresses)


OWN = Versions("1.0", "3.11.4", "2.13.0")


def test_hosts_that_fit_are_not_mentioned() -> None:
    patch = Versions("1.0", "3.11.9", "2.13.0+cpu")
    assert describe_mismatch({"a": OWN, "b": patch}) == ""


@pytest.mark.parametrize(
    ("other", "what", "text"),
    [
        (Versions("1.1", "3.11.4", "2.13.0"), "cellmesh", "a has 1.0, b has 1.1"),
        (Versions("1.0", "3.12.4", "2.13.0"), "Python", "a has 3.11.4, b has 3.12.4"),
        (Versions("1.0", "3.11.4", ""), "torch", "a has 2.13.0, b has none"),
    ],
)
def test_hosts_that_differ_are_named_with_their_versions(
    other: Versions, what: str, text: str
) -> None:
    problem = describe_mismatch({"a": OWN, "b": other})
    assert problem.startswith(f"hosts differ in their {what}: {text}")


CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("asked", "environment", "chosen"),
    [
        (None, {}, {}),
        (None, {CUDA: "4,5"}, {}),  # the ranks inherit it
        (("0", "2"), {CUDA: "4,5,6,7"}, {CUDA: "4,6"}),
        (("1",), {CUDA: " GPU-aa, GPU-bb "}, {CUDA: "GPU-bb"}),
        (("1", "0"), {CUDA: "4,5"}, {CUDA: "5,4"}),
        (("GPU-aa",), {CUDA: "4,5"}, {CUDA: "GPU-aa"}),
        ((), {CUDA: "4,5"}, {CUDA: ""}),
    ],
)
def test_gpus_are_chosen_among_those_given(
    asked: tuple[str, ...] | None, environment: dict[str, str], chosen: dict[str, str]
) -> None:
    assert choose_gpus(asked, environment) == chosen


@pytest.mark.parametrize("environment", [{CUDA: "4,5"}, {CUDA: ""}])
def test_gpu_that_was_not_given_is_refused(environment: dict[str, str]) -> None:
    (source, text), *_ = environment.items()
    with pytest.raises(HostError, match=rf"--gpus 0,2: .* \({source}={text}\)"):
        choose_gpus(("0", "2"), environment)
