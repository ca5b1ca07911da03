"""The environment that users pass on to ranks, and the GPUs that they choose."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

import cellmesh as cm
from cellmesh.errors import MeshUsageError
from cellmesh.wire.environment import SET_BY_MESH
from cellmesh.workers.groups.group_factory import GLOO_SWITCHES
from tests.conftest import process_named

SECRET = "a word that is written nowhere"
NAMES = ("CM_GIVEN", "CM_SET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


# By torch when it is imported, and by an interpreter.
READ_AT_BEGIN = ["TORCH_LOGS=+dynamo", "PYTHONUTF8=1", "PYTHONDONTWRITEBYTECODE=1"]


def environment_of(mesh: cm.Mesh) -> dict[str, str | None]:
    """Return rank 1's variables."""
    found: dict[str, str | None] = mesh[1].run(lambda: {n: os.environ.get(n) for n in NAMES})
    return found


def test_variables_are_passed_on_and_written_to_no_log(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CM_SET", SECRET)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with cm.start(2, env=["CM_GIVEN=1", "CM_SET", "OMP_NUM_THREADS=3", *READ_AT_BEGIN]) as mesh:
        expected = dict(zip(NAMES, ("1", SECRET, "3", "2,3"), strict=True))
        assert environment_of(mesh) == expected
        assert mesh[1].run(lambda: __import__("torch").get_num_threads()) == 3
        # What torch reads at its import is there then.
        assert mesh[1].pull("__import__('logging').getLogger('torch._dynamo').level") == 10
        assert mesh[1].run(lambda: (sys.flags.utf8_mode, sys.flags.dont_write_bytecode)) == (1, 1)
        environment = mesh[0].run(lambda: dict(os.environ))
        new = {name for name, value in environment.items() if os.environ.get(name) != value}
        users = {"MPLBACKEND", "PLOTLY_RENDERER", "COLUMNS", "LINES", *NAMES}
        users |= {*GLOO_SWITCHES} | {each.partition("=")[0] for each in READ_AT_BEGIN}
        sockets = {name for name in new if name.endswith("_SOCKET_IFNAME")}
        assert new - users - sockets <= SET_BY_MESH
        mesh.restart()
        assert environment_of(mesh) == expected
        commands = [
            " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])
        ]
        logs = [path.read_text(errors="replace") for path in runtime_dir.rglob("*.log")]
        assert len(logs) > 2
        assert not [text for text in [*commands, *logs] if SECRET in text]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_groups_are_connected_at_once_whatever_the_environment_asks_for(
    num_ranks: int, runtime_dir: Path
) -> None:
    with cm.start(num_ranks, env="TORCH_GLOO_LAZY_INIT=1") as mesh:
        count = mesh[0].run(lambda: len(__import__("torch").distributed.group.WORLD.sockets))
        assert count == num_ranks - 1


def test_a_restart_takes_variables_and_the_working_directory_that_have_changed(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CM_SET", "1")
    with pytest.raises(MeshUsageError, match="the mesh sets LOCAL_RANK"):
        cm.start(1, env="LOCAL_RANK=1")
    with cm.start(2, env=["CM_SET", "CM_GIVEN=1"]) as mesh:
        assert mesh.restart() == ""
        monkeypatch.setenv("CM_SET", SECRET)
        monkeypatch.setenv("CM_GIVEN", "2")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.chdir(tmp_path)
        text = mesh.restart()
        assert "CM_SET" in text
        assert f"the working directory {tmp_path}" in text
        assert "CM_GIVEN" not in text
        assert SECRET not in text
        taken = dict(zip(NAMES, ("1", SECRET, "3", os.environ.get(NAMES[3])), strict=True))
        process_named(runtime_dir, "cellmesh-zygote").kill()
        mesh[1].submit_cell("import os; os._exit(1)").wait(30)
        mesh.heal()
        for _ in range(2):
            assert environment_of(mesh) == taken
            assert mesh.run(os.getcwd).list == [str(tmp_path)] * 2
            assert mesh.restart() == ""
        monkeypatch.delenv("CM_SET")
        assert "CM_SET" in mesh.restart()
        assert environment_of(mesh) == taken | {"CM_SET": None}
