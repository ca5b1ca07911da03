"""A stop or a death while C++ is built for torch.compile leaves nothing that is later taken for
whole.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import pytest

import cellmesh as cm

# Writes half of what it is to make, says so, and goes on for ever.
COMPILER = """#!/bin/sh
case "$*" in *--version*) exec g++ "$@";; esac
for word; do [ "$last" = -o ] && out=$word; last=$word; done
echo half > "$out"
: > "$(dirname "$0")/said"
exec sleep 600
"""
BUILD = """
import ctypes, functools, os
from torch._inductor.codecache import _worker_compile_cpp
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.cpp_builder import CppBuilder, CppOptions

def make(compiler, place):
    with open("{where}/kernel.cpp", "w") as file:
        file.write('extern "C" int seven() {{ return 7; }}')
    options = CppOptions(compiler=compiler)
    builder = CppBuilder("kernel", ["{where}/kernel.cpp"], options, "{where}")
    work = functools.partial(_worker_compile_cpp, "{where}/lock", (builder,))
    if place == "rank":
        work()
    else:
        pool = SubprocPool(1)
        pool.submit(work).result()
        pool.shutdown()
    return ctypes.CDLL(builder.get_target_file_path()).seven()
"""
WAIT_S = 60.0


@pytest.mark.parametrize(
    ("place", "end"),
    [("rank", "stopped"), ("worker", "killed")],
)
def test_a_library_is_there_whole_or_not_at_all(
    own_mesh: cm.Mesh, tmp_path: Path, place: str, end: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    os.mkfifo(tmp_path / "said")
    said = os.open(tmp_path / "said", os.O_RDONLY | os.O_NONBLOCK)
    where = tmp_path / "cache"
    where.mkdir()
    own_mesh.cell(BUILD.format(where=where))
    run = own_mesh[0].submit_cell(f"make('{compiler}', '{place}')")
    poll = select.poll()
    poll.register(said, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "the compiler was not started"
    os.close(said)
    if end == "stopped":
        run.interrupt()
    else:
        os.kill(own_mesh.report()[0].pid, signal.SIGKILL)
    with contextlib.suppress(cm.RankFailure, KeyboardInterrupt):
        run.result(WAIT_S)
    assert not list(where.glob("*.so")), "half a library has the name of a whole one"

    own_mesh.heal()
    own_mesh.cell(BUILD.format(where=where))
    own_mesh[0].cell(f"seven = make('g++', '{place}')")
    assert own_mesh[0].pull("seven") == 7
    assert not list(where.glob("*.part"))
