"""What tells hosts, processes and versions apart."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from cellmesh.wire.host import (
    Place,
    fits,
    format_span,
    is_process,
    own_python,
    own_version,
    process_stat,
    started_ticks,
    this_place,
)
from cellmesh.wire.marks import is_dead
from cellmesh.workers import linux_process

from ...support.tickets import make_ticket


def test_process_is_distinguished_from_a_later_one_with_its_pid() -> None:
    ticks = started_ticks(os.getpid())
    assert is_process(os.getpid(), ticks)
    assert not is_process(os.getpid(), ticks + 1)
    assert not is_process(os.getpid(), 0)


def test_a_process_that_has_ended_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = started_ticks(process.pid)
    assert is_process(process.pid, ticks)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_process(process.pid, ticks), "what is to be reaped still has its number"
    process.communicate()
    assert started_ticks(process.pid) == 0


@pytest.mark.parametrize("name", [b"\xe9t\xe9", b"entra\xc3\xaenement-\xc3", b") R 1 (", b"a b\n)"])
def test_a_process_may_have_any_bytes_as_its_name(name: bytes) -> None:
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_process(process.pid, started_ticks(process.pid))
        assert process.pid in linux_process.children(os.getpid())
        assert process.pid in linux_process.descendants(os.getpid())
        process.kill()


def test_the_main_threads_name_does_not_hide_what_it_does() -> None:
    before = ctypes.create_string_buffer(16)
    libc = ctypes.CDLL(None)
    libc.prctl(16, before)
    libc.prctl(15, b"\xff) S (\xff")
    try:
        assert process_stat(f"self/task/{os.getpid()}")[0] == b"R"
    finally:
        libc.prctl(15, before.value)


def test_a_place_is_the_same_for_processes_that_see_each_other() -> None:
    code = "from cellmesh.wire.host import this_place; print(repr(this_place()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == repr(this_place())


def test_only_a_mesh_of_this_place_is_known_to_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        ended = {"agent_pid": process.pid, "agent_ticks": started_ticks(process.pid) or 1}
    here = this_place()
    assert is_dead(make_ticket(place=here, **ended))
    assert not is_dead(make_ticket(place=Place("other", here.boot, here.pid_namespace), **ended))
    living = {"agent_pid": os.getpid(), "agent_ticks": started_ticks(os.getpid())}
    assert not is_dead(make_ticket(place=here, **living))


def test_versions_are_those_that_run() -> None:
    import cellmesh

    assert own_version() == cellmesh.__version__
    assert own_python().startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


@pytest.mark.parametrize(
    ("one", "other", "is_fit"),
    [("3.11.2", "3.11.9", True), ("3.11.2", "3.12.2", False), ("3.11.2", "", False)],
)
def test_minor_versions_of_python_do_not_mix(one: str, other: str, is_fit: bool) -> None:
    assert fits(one, other) is is_fit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (720, "12 min"), (7200, "2 h"), (86400 * 3, "3 d")],
)
def test_format_of_durations(seconds: float, text: str) -> None:
    assert format_span(seconds) == text
