"""Which living mesh a notebook is offered, and what it is shown of the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cellmesh.controller.session import living, start
from cellmesh.controller.session.living import (
    LivingMesh,
    choose,
    describe_left,
    end_left,
    left_meshes,
    table_of,
)
from cellmesh.controller.session.start import find_same, offer_left
from cellmesh.errors import MeshUsageError
from cellmesh.wire.attach import RunInfo
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import Holder

from ....support.tickets import address, make_ticket

OWN, OTHER, UNNAMED = "/home/a/own.ipynb", "/home/a/other.ipynb", "/run/kernel-1.json"


def mesh(name: str, held: bool = False, notebook: str = OWN, **fields: Any) -> LivingMesh:
    usual = {"cwd": os.getcwd(), "backend": "auto", "controller_pid": 1, "created_at": 100.0}
    ticket = make_ticket(name=name, directory=f"/run/{name}", notebook=notebook, **usual | fields)
    holder = Holder(controller_pid=77, is_attached=held, since=160.0, notebook=notebook)
    return LivingMesh(ticket, holder, (RunInfo(5, (0, 1), "cell 5"),) if held else ())


def this_notebook(monkeypatch: pytest.MonkeyPatch, name: str, *meshes: LivingMesh) -> None:
    """Let this process be that of a notebook, and these meshes live."""
    for module in (living, start):
        monkeypatch.setattr(module, "own_notebook", lambda: name)
    monkeypatch.setattr(living, "find_living", lambda asks: list(meshes))


@pytest.mark.parametrize(
    ("meshes", "steal", "chosen"),
    [
        ([mesh("a", held=True)], False, "a"),  # the agent's refusal says the rest
        ([mesh("a", held=True), mesh("b")], False, "b"),
        ([mesh("a", held=True), mesh("b")], True, "a"),
        ([mesh("a"), mesh("b")], False, None),
        ([mesh("a"), mesh("b", notebook=OTHER)], False, "a"),
        ([mesh("a", notebook=OTHER), mesh("b", notebook=OTHER)], False, None),
        ([mesh("a", held=True), mesh("b", held=True)], False, None),
        ([], False, None),
    ],
)
def test_an_attach_without_a_name_takes_the_only_free_mesh(
    meshes: list[LivingMesh], steal: bool, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, OWN)
    found = choose(meshes, steal)
    assert (found.name if found is not None else None) == chosen


def test_the_table_names_notebook_holder_and_runs() -> None:
    home = Path.home()
    meshes = [
        mesh("a", held=True, notebook=str(home / "x.ipynb")),
        mesh("long-name", notebook=UNNAMED, cwd="/data"),
    ]
    assert table_of(meshes, 400.0).splitlines() == [
        "NAME       RANKS  AGE    NOTEBOOK   HELD BY           RUNS",
        "a          2      5 min  ~/x.ipynb  process 77        cell 5 on ranks 0-1",
        "long-name  2      5 min  in /data   nobody for 4 min  nothing",
    ]


@pytest.mark.parametrize(
    ("notebook", "there", "is_left"),
    [
        (OWN, mesh("a"), True),
        (OWN, mesh("a", held=True), False),
        (OWN, mesh("a", notebook=OTHER), False),
        (OWN, mesh("a", notebook=UNNAMED), True),  # of this folder
        (OWN, mesh("a", notebook=UNNAMED, cwd="/data"), False),
        (UNNAMED, mesh("a", notebook="/run/kernel-2.json"), True),
        (UNNAMED, mesh("a", notebook=UNNAMED, cwd="/data"), True),
        ("", mesh("a", notebook=""), True),
    ],
)
def test_a_notebook_has_left_its_own_meshes_and_those_of_its_folder(
    notebook: str, there: LivingMesh, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, notebook, there)
    assert left_meshes(asks=True) == ([there] if is_left else [])


@pytest.mark.parametrize(
    ("given", "there", "is_same"),
    [
        ({"num_ranks": 2}, mesh("a"), True),
        ({"num_ranks": 4}, mesh("a"), False),
        ({"num_ranks": 2}, mesh("a", notebook=OTHER), False),
        ({"mesh": "dp=1,tp=2"}, mesh("a"), False),
        ({"num_ranks": 2, "settle_s": 5}, mesh("a"), False),
        ({"num_ranks": 2, "name": "b"}, mesh("a"), False),
    ],
)
def test_a_start_with_the_options_of_an_own_mesh_is_offered_that(
    given: dict[str, Any], there: LivingMesh, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, OWN)
    assert find_same(given, [there]) == ([there] if is_same else [])


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_the_offer_names_each_mesh_and_the_commands(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    this_notebook(monkeypatch, OWN)
    text = str(offer_left([mesh(name) for name in names]))
    assert all(f"{name}, of this notebook, lives on" in text for name in names)
    assert f"`%dist_attach {names[-1]}`" in text
    assert f"--fresh` ends {'it' if len(names) == 1 else 'them'}" in text


def test_a_mesh_on_many_hosts_that_were_not_asked_may_live_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this_notebook(monkeypatch, OWN)
    agents = (address("a"), address("b", 1))
    left = mesh("a", agents=agents, curve_secret=Secret("s"), controller_pid=2**30)
    unasked = LivingMesh(left.ticket, None)
    assert unasked.is_free
    assert "may live on: 2 ranks on a, b" in describe_left(unasked)


def test_a_mesh_that_is_held_is_not_ended() -> None:
    with pytest.raises(MeshUsageError, match=r"a is held by process 77.*cellmesh stop a"):
        end_left(mesh("a", held=True))
