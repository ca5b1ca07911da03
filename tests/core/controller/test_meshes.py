"""The meshes of a process by name, and the mesh that a start is about."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.live_views import LiveViews
from cellmesh.controller.meshes import Meshes, free_gpus, given_gpus, gpus_of, own_meshes
from cellmesh.controller.output.cell import Displays
from cellmesh.controller.session.alike import name_of_same
from cellmesh.errors import MeshUsageError


def mesh(name: str, ending: str = "") -> Any:
    session = SimpleNamespace(ending=ending, displays=Displays(), shown=LiveViews())
    return SimpleNamespace(name=name, rank_set=SimpleNamespace(session=session))


@pytest.fixture
def meshes() -> Meshes:
    found = Meshes()
    for name in ("trainer", "generator"):
        found.add(mesh(name))
    return found


def test_meshes_are_a_read_only_mapping(meshes: Meshes) -> None:
    assert list(meshes) == meshes._ipython_key_completions_() == ["trainer", "generator"]
    assert meshes["generator"].name == "generator"
    assert "scorer" not in meshes
    assert meshes.get("scorer") is None
    with pytest.raises(TypeError):
        meshes["x"] = mesh("x")  # type: ignore[index]


def test_an_unknown_name_gets_the_nearest(meshes: Meshes) -> None:
    with pytest.raises(KeyError) as raised:
        meshes["genrator"]
    assert str(raised.value) == (
        "this notebook has no mesh 'genrator' (there is trainer, generator); "
        "did you mean 'generator'?"
    )
    with pytest.raises(cm.CellmeshError, match="`%dist_start 4` starts one"):
        Meshes()["genrator"]


def test_a_mesh_that_has_ended_says_so_until_another_is_added(meshes: Meshes) -> None:
    meshes["trainer"].rank_set.session.ending = "trainer has ended (stopped)"  # type: ignore[misc]
    assert list(meshes) == ["generator"]
    with pytest.raises(KeyError, match="has ended"):
        meshes["trainer"]
    meshes.add(mesh("scorer"))
    with pytest.raises(KeyError, match="there is generator, scorer"):
        meshes["trainer"]
    meshes.add(mesh("trainer"))
    assert list(meshes) == ["generator", "scorer", "trainer"]


def test_the_package_has_those_of_the_process() -> None:
    assert cm.meshes is own_meshes()


@pytest.mark.parametrize(
    ("given", "held", "same"),
    [
        ({"num_ranks": 2}, ["mesh-1-abcd"], "mesh-1-abcd"),
        ({"num_ranks": 2}, ["trainer"], "trainer"),  # as one mesh always was kept
        ({"num_ranks": 2}, ["mesh-1-abcd", "generator"], "mesh-1-abcd"),  # Run All, twice
        ({"num_ranks": 2}, ["trainer", "generator"], "generator"),  # the one in use
        ({"num_ranks": 2, "name": "trainer"}, ["trainer", "generator"], "trainer"),
        ({"num_ranks": 2, "name": "scorer"}, ["mesh-1-abcd", "generator"], ""),
    ],
)
def test_a_start_is_about_a_mesh_that_runs_or_a_new_one(
    given: dict[str, Any],
    held: list[str],
    same: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # without options of a project
    assert name_of_same(given, held) == same


def test_output_is_headed_by_the_mesh_where_there_are_several(meshes: Meshes) -> None:
    of = {name: each.rank_set.session.displays.heading for name, each in meshes.items()}
    trainer, generator = of["trainer"], of["generator"]
    assert trainer is not None
    assert generator is not None
    shown = [trainer(True), trainer(False), generator(True), generator(False), trainer(False)]
    assert shown == ["trainer:", "", "generator:", "", "trainer:"]
    meshes["generator"].rank_set.session.ending = "stopped"  # type: ignore[misc]
    assert trainer(True) == ""
    alone = Meshes()
    alone.add(mesh("only"))
    assert alone["only"].rank_set.session.displays.heading is None


def test_a_mesh_beside_others_gets_gpus_that_are_free() -> None:
    assert given_gpus({"CUDA_VISIBLE_DEVICES": "4, 5,6"}) == ["4", "5", "6"]
    given = ["0", "1", "2", "3"]
    assert free_gpus(given, {}) is free_gpus([], {"a": []}) is None
    assert free_gpus(given, {"cpu": []}) is None
    assert free_gpus(given, {"a": ["0"], "b": ["2"]}) == ["1", "3"]
    with pytest.raises(MeshUsageError, match=r"\(0 a, 1 b\): `--gpus 0,1` .* `--gpus none`"):
        free_gpus(["0", "1"], {"a": ["0"], "b": ["1"]})


@pytest.mark.parametrize(
    ("env", "num_ranks", "used"),
    [({}, 2, ["0", "1"]), ({}, 9, ["0", "1", "2"]), ({"CUDA_VISIBLE_DEVICES": "2"}, 2, ["2"]),
     ({"CUDA_VISIBLE_DEVICES": ""}, 2, [])],
)  # fmt: skip
def test_ranks_use_the_first_gpus_that_their_mesh_sees(
    env: dict[str, str], num_ranks: int, used: list[str]
) -> None:
    ticket: Any = SimpleNamespace(env=env, num_ranks=num_ranks, spans_hosts=False)
    assert gpus_of(ticket, ["0", "1", "2"]) == used


def test_only_ranks_on_gpus_use_some(meshes: Meshes) -> None:
    for name, device in (("trainer", "cuda:0"), ("generator", "cpu")):
        one: Any = meshes[name]
        one.ready_ranks = [SimpleNamespace(device=device)]
        one.rank_set.session.ticket = SimpleNamespace(env={}, num_ranks=1, spans_hosts=False)
    assert meshes.gpus(["0", "1"]) == {"trainer": ["0"]}
    assert meshes.gpus(["0", "1"], but="trainer") == {}


def test_a_resize_takes_no_gpu_that_another_mesh_uses(
    meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for name, gpus, num_ranks in (("trainer", "0,1,2", 1), ("generator", "2,3", 2)):
        one: Any = meshes[name]
        one.ready_ranks = [SimpleNamespace(device="cuda:0")] * num_ranks
        one.rank_set.session.ticket = SimpleNamespace(
            env={"CUDA_VISIBLE_DEVICES": gpus}, num_ranks=num_ranks, spans_hosts=False
        )
    check: Any = meshes["trainer"].rank_set.session.check_size
    check(2)
    with pytest.raises(
        MeshUsageError, match="trainer would take GPU 2, which generator uses: `%dist_stop --on"
    ):
        check(3)
    meshes["generator"].rank_set.session.ending = "stopped"  # type: ignore[misc]
    check(3)
