"""A backend in a C++ extension, as the tutorial on custom backends has one: its waits end, and the
group works after the heal, also under DDP.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import cellmesh as cm
from cellmesh.errors import RanksInterrupted
from tests.conftest import check_nothing_left
from tests.mesh.conftest import Recorder

SOURCE = Path(__file__).with_name("extensions") / "waiting_backend.cpp"
START = """
import sys
sys.path.append({!r})
import waiting_backend

dist.Backend.register_backend("waiting", waiting_backend.create, devices=["cpu"])
group = dist.new_group(backend="waiting")
"""
REDUCE = "x = torch.ones(1) + rank\ndist.all_reduce(x, group=group)"


def build(directory: Path) -> None:
    """Compile the extension into a directory."""
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE)),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in folders),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        *("-o", str(directory / "waiting_backend.so")),
    ]
    subprocess.run(command, check=True)


@pytest.mark.timeout(600)  # the compiler takes a minute
def test_waits_in_cpp_end_and_the_group_is_made_again(runtime_dir: Path, tmp_path: Path) -> None:
    build(tmp_path)
    with cm.start(2, settle_s=0.1) as mesh:
        mesh.cell(START.format(str(tmp_path)))
        mesh.cell(REDUCE)
        assert mesh.pull("x.item()").list == [3, 3]

        failing, stopping = Recorder(), Recorder()
        run = mesh.submit_cell(f"if rank == 1: raise ValueError('mine')\n{REDUCE}", sink=failing)
        with pytest.raises(cm.RankFailure, match=r"rank 0 waited in all_reduce.*released"):
            run.result(timeout_s=60)
        assert "backend 'waiting', was made again by" in failing.wait_for_note("rebuilt")
        mesh.cell(REDUCE)
        assert mesh.pull("x.item()").list == [3, 3]

        run = mesh[0:1].submit_cell(f"print('waiting')\n{REDUCE}", sink=stopping)
        stopping.wait_for_line("waiting")
        run.interrupt()
        with pytest.raises((RanksInterrupted, KeyboardInterrupt)):
            run.result(timeout_s=60)
        mesh.cell(f"{REDUCE}\ny = torch.ones(1)\ndist.all_reduce(y)")
        assert mesh.pull("(x.item(), y.item())").list == [(3, 2)] * 2
    check_nothing_left(runtime_dir)
