"""The magics' lines: read, explained, and refused with the nearest that would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.errors import MeshUsageError
from cellmesh.magics.options import (
    CELL_MAGICS,
    COMMANDS,
    START_OPTIONS,
    describe,
    parse,
    wants_help,
)

from ...support.examples import examples

every_magic = pytest.mark.parametrize("name", COMMANDS)


@pytest.mark.parametrize(
    ("name", "line", "options"),
    [
        ("dist_start", "8", {"num_ranks": 8}),
        ("dist_start", "8 --mesh dp=2,tp=4", {"num_ranks": 8, "mesh": "dp=2,tp=4"}),
        (
            "dist_start",
            "--mesh=dp=2 --backend gloo",
            {"num_ranks": None, "mesh": "dp=2", "backend": "gloo"},
        ),
        ("dist_start", "--mesh 'dp=2 tp=4'", {"mesh": "dp=2 tp=4"}),
        ("dist_start", '--mesh="dp=2, tp=4"', {"mesh": "dp=2, tp=4"}),
        ("dist_start", "2 --preload a,b --name x", {"preload": "a,b", "name": "x"}),
        ("dist", "", {"ranks": None, "at": None, "nowait": False, "quiet": False}),
        ("dist", "--ranks 0,2-3 -q", {"ranks": "0,2-3", "quiet": True}),
        ("dist", "--at tp=0 --nowait", {"at": "tp=0", "nowait": True}),
        (
            "dist",
            """--argv "--lr 0.1 --name 'a b'" -q""",
            {"argv": "--lr 0.1 --name 'a b'", "quiet": True},
        ),
        ("dist", "--argv=--lr=1", {"argv": "--lr=1"}),
        ("dist_profile", "--argv '--lr 0.1' -o t.json", {"argv": "--lr 0.1", "trace": "t.json"}),
        ("dist_auto", "on", {"switch": "on"}),
        ("dist_mesh", "dp=2 tp=4", {"dims": ("dp=2", "tp=4")}),
        ("dist_mesh", "", {"dims": ()}),
        ("dist_push", "x y --ranks 1", {"names": ("x", "y"), "ranks": "1"}),
        (
            "dist_pull",
            "loss --all",
            {"expression": ("loss",), "all": True, "rank": None, "target": None},
        ),
        ("dist_pull", "loss --rank 3 --as l", {"rank": 3, "target": "l"}),
        ("dist_inspect", "model.layers[0].weight", {"expression": ("model.layers[0].weight",)}),
        ("dist_logs", "", {"ranks": None, "lines": 50}),
        ("dist_logs", "0-2 --lines 200", {"ranks": "0-2", "lines": 200}),
        ("dist_interrupt", "--ranks 1", {"ranks": "1"}),
        ("dist_save", "model opt runs/x", {"names": ("model", "opt", "runs/x")}),
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
        'x["key"]',
        "d['a']['b']",
        "it's",
        "x[0]",
        "a + b",
        "f(x, y)",
        "[v for v in x]",
        "x if y else 'z'",
        "a - b",
        "x[-1]",
        "a-1",
        "2*-x",
        "x['two  words']",
        'names["a   b"]',
    ],
)
def test_expressions_are_passed_unchanged(expression: str) -> None:
    assert " ".join(parse("dist_pull", expression)["expression"]) == expression


@pytest.mark.parametrize(
    ("name", "line", "nearest"),
    [
        ("dist_start", "4 --bakend gloo", "--backend"),
        ("dist_start", "4 --preloads x", "--preload"),
        ("dist", "--rank 0", "--ranks"),
        ("dist", "--no-wait", "--nowait"),
        ("dist", "--quite", "--quiet"),
        ("dist_pull", "x --al", "--all"),
        ("dist_logs", "--line 3", "--lines"),
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
        ("dist_start", "8.5", "'8.5' is not a valid integer"),
        ("dist_start", "4 5", "unexpected extra argument"),
        ("dist_start", "4 --mesh", "requires an argument"),
        ("dist_auto", "", "Missing argument"),
        ("dist_auto", "maybe", "'maybe' is not one of 'on', 'off'"),
        ("dist_push", "", "Missing argument"),
        ("dist_pull", "", "Missing argument"),
        ("dist_pull", "x --rank one", "'one' is not a valid integer"),
        ("dist_logs", "0 --lines 0", "0 is not in the range"),
        ("dist_logs", "0 --lines many", "'many' is not a valid integer"),
        ("dist_stop", "one two", "unexpected extra argument"),
        ("dist", "0,2", "unexpected extra argument"),
        ("dist_start", "-1", "-1"),
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
    ("name", "line"),
    [
        ("dist_mesh", "Usage: %dist_mesh [OPTIONS] [DIMS]..."),
        ("dist_pull", "Usage: %dist_pull [OPTIONS] EXPRESSION..."),
        ("dist_load", "Usage: %dist_load [OPTIONS] [NAME...] PATH"),
        ("dist", "  -q, --quiet       Show nothing but errors."),
        ("dist_pull", "  --reduce mean|sum|stack  Of all ranks' values."),
        ("dist_logs", "  --lines COUNT  How much.  [default: 50; x>=1]"),
        (
            "dist_profile",
            "  -o, --output FILE  Write one Chrome trace, for Perfetto: a process for",
        ),
        ("dist_start", "  --fresh"),
    ],
)
def test_help_has_this_line(name: str, line: str) -> None:
    assert any(each.startswith(line) for each in describe(name).splitlines()), describe(name)


@pytest.mark.parametrize(
    "name", [each.opts[0] for each in START_OPTIONS if isinstance(each, click.Option)]
)
def test_an_option_of_a_start_stands_in_the_table_of_the_usage(name: str) -> None:
    usage = (Path(__file__).parents[3] / "docs/usage.md").read_text()
    assert f"`{name}" in usage.partition("| option of `%dist_start` |")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("line", "wanted"), [("--help", True), (" -h ", True), ("", False), ("x -h", False)]
)
def test_help_option_is_recognized(line: str, wanted: bool) -> None:
    assert wants_help(line) is wanted
