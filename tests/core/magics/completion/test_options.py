"""What could stand at the end of a magic's line."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.magics.completion.hooks import complete_line
from cellmesh.magics.completion.meanings import Choices, NameSources
from cellmesh.magics.options import COMMANDS


def on_ranks(typed: str, names_only: bool) -> Choices:
    if typed.startswith("model."):
        return Choices(typed.removeprefix("model."), () if names_only else ("layers", "weight"))
    return Choices(typed, tuple(name for name in ("loss", "model") if name.startswith(typed)))


SOURCES = NameSources(
    on_ranks=on_ranks,
    in_notebook=lambda: ["batch", "lr"],
    meshes=lambda: ["mesh-1", "mesh-2"],
    numbers=lambda: ["accuracy", "loss"],
)
NO_MESH = NameSources(
    lambda typed, _: Choices(typed, ()), lambda: ["batch"], lambda: [], lambda: []
)


def texts(line: str, sources: NameSources = SOURCES) -> tuple[str, ...]:
    found = complete_line(line, sources)
    return found.texts if found is not None else ()


@pytest.mark.parametrize(
    ("line", "typed", "expected"),
    [
        ("%dist_start --ba", "--ba", ("--backend",)),
        ("%dist_start --backend ", "", ("auto", "gloo", "nccl")),
        ("%dist_start --backend n", "n", ("nccl",)),
        ("%dist_start --backend=n", "n", ("nccl",)),
        ("%dist_start 8 --on-error ", "", ("release", "wait")),
        ("%dist_auto ", "", ("on", "off")),
        ("%dist_auto of", "of", ("off",)),
        ("%%dist --ra", "--ra", ("--ranks",)),
        ("%dist_push ", "", ("batch", "lr")),
        ("%dist_push batch l", "l", ("lr",)),
        ("%dist_pull lo", "lo", ("loss",)),
        ("%dist_pull model.", "", ("layers", "weight")),
        ("x = %dist_pull lo", "lo", ("loss",)),
        ("  %dist_pull lo", "lo", ("loss",)),
        ("%dist_inspect model.", "", ("layers", "weight")),
        ("%dist_check mo", "mo", ("model",)),
        ("%dist_who l", "l", ("loss",)),
        ("%dist_plot a", "a", ("accuracy",)),
        ("%dist_attach m", "m", ("mesh-1", "mesh-2")),
    ],
)
def test_completion_offers_options_and_values(
    line: str, typed: str, expected: tuple[str, ...]
) -> None:
    found = complete_line(line, SOURCES)
    assert found is not None
    assert (found.typed, found.texts) == (typed, expected)
    assert line.endswith(found.typed)


def test_an_option_is_offered_once() -> None:
    assert "--ranks" in texts("%%dist -")
    assert "--ranks" not in texts("%%dist --ranks 1 -")
    assert "-q" not in texts("%%dist --quiet -")


def test_options_are_offered_where_nothing_else_stands() -> None:
    assert texts("%dist_status ") == ("--debug", "--live")
    assert texts("%%dist ")[0].startswith("--")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_offered(name: str) -> None:
    offered = texts(f"%{name} -")
    options = [param for param in COMMANDS[name].params if isinstance(param, click.Option)]
    assert set(offered) == {flag for param in options for flag in param.opts}


@pytest.mark.parametrize(
    "line",
    ["x = 1", "%time x", "%dist_start", "%dist_status x", "dist_start --ba", "%dist_detach "],
)
def test_other_lines_are_left_alone(line: str) -> None:
    assert complete_line(line, SOURCES) is None


def test_without_a_mesh_there_are_options_and_no_names() -> None:
    assert texts("%%dist --ra", NO_MESH) == ("--ranks",)
    assert texts("%dist_pull lo", NO_MESH) == ()


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "two words.py", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").mkdir()
    monkeypatch.chdir(tmp_path)
    assert texts("%dist_export ") == ("runs/", "train.py")
    assert texts("%dist_export .h") == (".hidden",)
    assert texts("%dist_export 'tw") == ("two words.py",)
    assert complete_line("%dist_load model runs/l", SOURCES) == Choices("l", ("latest/",), "path")
    assert complete_line(f"%dist_export {tmp_path}/tr", SOURCES) == Choices(
        "tr", ("train.py",), "path"
    )
    assert texts("%dist_save model ") == ("loss", "model", "runs/", "train.py")
    assert texts("%dist_export no/such/") == ()
    assert texts("%dist_timeline -o tr") == ("train.py",)


@given(st.sampled_from(sorted(map(str, COMMANDS))), st.text(max_size=30))
def test_any_line_is_completed_or_left_alone(name: str, rest: str) -> None:
    line = f"%{name} {rest}"
    found = complete_line(line, SOURCES)
    assert found is None or (found.texts and line.endswith(found.typed))
