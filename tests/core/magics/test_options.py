"""The magics' lines: read, explained, completed, and refused with the nearest that would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from cellmesh.controller.actors import Actor
from cellmesh.errors import MeshUsageError
from cellmesh.magics.completion import complete_handle, complete_line
from cellmesh.magics.extension import propose_magic
from cellmesh.magics.options import (
    CELL_MAGICS,
    COMMANDS,
    START_OPTIONS,
    Choices,
    Meaning,
    describe,
    parse,
)
from cellmesh.wire.options import StartOptions

from ...support.examples import examples

every_magic = pytest.mark.parametrize("name", COMMANDS)


@pytest.mark.parametrize(
    ("name", "line", "options"),
    [
        ("dist_start", "8", {"num_ranks": 8}),
        ("dist_start", "8 --mesh dp=2,tp=4", {"num_ranks": 8, "mesh": "dp=2,tp=4"}),
        ("dist_start", '--mesh="dp=2, tp=4"', {"mesh": "dp=2, tp=4"}),
        ("dist", "--ranks 0,2-3 -q", {"ranks": "0,2-3", "quiet": True}),
        ("dist", "--at tp=0 --nowait", {"at": "tp=0", "nowait": True}),
        ("dist", """--argv "--lr '0 1'" -q""", {"argv": "--lr '0 1'", "quiet": True}),
        ("dist_mesh", "dp=2 tp=4", {"dims": ("dp=2", "tp=4")}),
        ("dist_push", "x y --ranks 1", {"names": ("x", "y"), "ranks": "1"}),
        ("dist_pull", "loss --rank 3 --as l", {"rank": 3, "target": "l"}),
        ("dist_logs", "0-2 --lines 200", {"ranks": "0-2", "lines": 200}),
        ("dist_pull", "x - y --on scorer", {"expression": ("x", "-", "y"), "on": "scorer"}),
        ("dist_stop", "--on scorer", {"name": None, "on": "scorer"}),
        ("dist_load", "'my runs/x' --ranks 0", {"names": ("'my runs/x'",), "ranks": "0"}),
    ],
)
def test_lines_are_read(name: str, line: str, options: dict[str, Any]) -> None:
    read = parse(name, line)
    assert {key: read[key] for key in options} == options


@pytest.mark.parametrize(
    "expression",
    [
        "x['key']",
        "it's",
        "a - b",
        "x[-1]",
        "x['two  words']",
    ],
)
def test_expressions_are_passed_unchanged(expression: str) -> None:
    assert " ".join(parse("dist_pull", expression)["expression"]) == expression


@pytest.mark.parametrize(
    ("name", "line", "nearest"),
    [
        ("dist_start", "4 --bakend gloo", "--backend"),
        ("dist", "--rank 0", "--ranks"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, line: str, nearest: str) -> None:
    with pytest.raises(MeshUsageError, match="No such option") as caught:
        parse(name, line)
    assert f"'{nearest}'" in str(caught.value)
    mark = "%%" if name == "dist" else "%"
    assert str(caught.value).startswith(f"{mark}{name}: ")
    assert f"({mark}{name}? shows its options)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("dist_start", "eight", "'eight' is not a valid integer"),
        ("dist_start", "4 5", "unexpected extra argument"),
        ("dist_start", "4 --mesh", "requires an argument"),
        ("dist_auto", "maybe", "'maybe' is not one of 'on', 'off'"),
        ("dist_pull", "", "Missing argument"),
        ("dist_logs", "0 --lines 0", "0 is not in the range"),
        ("dist", "0,2", "unexpected extra argument"),
    ],
)
def test_unknown_arguments_of_a_magic_are_refused(name: str, line: str, said: str) -> None:
    with pytest.raises(MeshUsageError) as caught:
        parse(name, line)
    assert said in str(caught.value)


@every_magic
@examples(20)
@given(line=st.text(max_size=30))
def test_any_line_is_read_or_refused(name: str, line: str) -> None:
    try:
        options = parse(name, line)
    except MeshUsageError:
        return
    assert set(options) == {param.name for param in COMMANDS[name].params}


# ---- help


@every_magic
def test_every_magic_explains_its_options_with_an_example_that_is_read(
    name: str,
) -> None:
    text = describe(name)
    mark = "%%" if name in CELL_MAGICS else "%"
    assert text.startswith(f"Usage: {mark}{name} [OPTIONS]")
    for param in COMMANDS[name].params:
        if isinstance(param, click.Option):
            assert param.opts[-1] in text
            assert param.help
    example = text.partition("Example:")[2].strip().splitlines()[0].strip()
    assert example.startswith(f"{mark}{name}")
    parse(name, example.removeprefix(f"{mark}{name}"))


@pytest.mark.parametrize(
    "name", [each.opts[0] for each in START_OPTIONS if isinstance(each, click.Option)]
)
def test_an_option_of_a_start_stands_in_the_table_of_the_usage(name: str) -> None:
    usage = (Path(__file__).parents[3] / "docs/usage.md").read_text()
    assert f"`{name}" in usage.partition("| option of `%dist_start` |")[2].partition("\n\n")[0]


def test_every_option_of_a_start_has_a_flag_but_prestart() -> None:
    options = {"num_ranks", *StartOptions.__annotations__} - {"prestart"}
    assert {each.name for each in START_OPTIONS} == options


def complete_word(typed: str, meaning: Meaning) -> Choices:
    if meaning == "notebook's name":
        return Choices(typed, tuple(name for name in ("batch", "lr") if name.startswith(typed)))
    if typed.startswith("model."):
        parts = ("layers", "weight") if meaning == "expression" else ()
        return Choices(typed.removeprefix("model."), parts)
    return Choices(typed, tuple(name for name in ("loss", "model") if name.startswith(typed)))


def texts(line: str) -> tuple[str, ...]:
    found = complete_line(line, complete_word)
    return found.texts if found is not None else ()


@pytest.mark.parametrize(
    ("line", "typed", "expected"),
    [
        ("%dist_start --ba", "--ba", ("--backend",)),
        ("%dist_start --backend n", "n", ("nccl",)),
        ("%dist_start --backend=n", "n", ("nccl",)),
        ("%dist_auto of", "of", ("off",)),
        ("%%dist --ra", "--ra", ("--ranks",)),
        ("%dist_push batch l", "l", ("lr",)),
        ("%dist_pull model.", "", ("layers", "weight")),
        ("x = %dist_pull lo", "lo", ("loss",)),
        ("%dist_inspect model.", "", ("layers", "weight")),
        ("%dist_save model lo", "lo", ("loss",)),
    ],
)
def test_completion_offers_options_and_values(
    line: str, typed: str, expected: tuple[str, ...]
) -> None:
    found = complete_line(line, complete_word)
    assert found is not None
    assert (found.typed, found.texts) == (typed, expected)
    assert line.endswith(found.typed)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_offered(name: str) -> None:
    offered = texts(f"%{name} -")
    options = [param for param in COMMANDS[name].params if isinstance(param, click.Option)]
    assert set(offered) == {flag for param in options for flag in param.opts}
    if "--ranks" in offered:
        assert "--ranks" not in texts(f"%{name} --ranks 1 -")


@pytest.mark.parametrize(
    "line",
    [
        "x = 1",
        "%time x",
        "%dist_start",
        "%dist_status x",
        "dist_start --ba",
        "%load_ext ",
        "%dist_push no",
        "%dist_save model runs/l",
        "%dist_attach x",
    ],
)
def test_other_lines_are_left_alone(line: str) -> None:
    assert complete_line(line, complete_word) is None


@given(st.sampled_from(sorted(map(str, COMMANDS))), st.text(max_size=30))
def test_any_line_is_completed_or_left_alone(name: str, rest: str) -> None:
    line = f"%{name} {rest}"
    found = complete_line(line, complete_word)
    assert found is None or (found.texts and line.endswith(found.typed))


@pytest.mark.parametrize(
    ("cell", "proposed"),
    [
        ("%dist_chek m", "did you mean `%dist_check`?\n"),
        ("%%dst\nx", "did you mean `%%dist`?\n"),
        ("%nothing_like_it", ""),
        ("1 / 0", ""),
    ],
)
def test_the_nearest_magic_is_proposed(
    cell: str, proposed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(HistoryManager={"enabled": False})
    result = InteractiveShell(config=config).run_cell(cell)
    capsys.readouterr()
    propose_magic(result)
    assert capsys.readouterr().err == proposed


class Trainer(Actor):
    """A handle of a class with three methods."""

    def __init__(self) -> None: ...

    def __dir__(self) -> list[str]:
        return ["load", "step", "stop"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainer[0].", ("load", "step", "stop")),
        ("x = f(trainer[[0, 1]].st", ("step", "stop")),
        ("trainer[-1:].lo", ("load",)),
        ("trainer.", None),
        ("losses[0].", None),
        ("unknown[0].", None),
        ("trainer[0].step.su", None),
    ],
)
def test_methods_of_a_part_of_an_actor_are_completed(
    line: str, expected: tuple[str, ...] | None
) -> None:
    found = complete_handle(line, {"trainer": Trainer(), "losses": [0.1]})
    assert (found and found.texts) == expected
