"""The switch to one rank's output: when there is one, what is in it, and that nothing breaks out of
it.
"""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from cellmesh.controller.output.fold import Gap, Item, Line, Rich, Trace
from cellmesh.controller.output.rank_tabs import LIMIT_BYTES, switch

from ....support import blocks


def out(text: str) -> Line:
    return Line("stdout", text)


def rich(**data: Any) -> Rich:
    item = blocks.rich(**data).item
    assert isinstance(item, Rich)
    return item


def switch_of(*outputs: tuple[Item, ...], dropped: tuple[int, ...] = ()) -> str:
    """The switch between ranks 0, 1, ... with these outputs."""
    return switch(dict(enumerate(outputs)), dropped, "abc123")


def parts_of(text: str) -> dict[str, str]:
    """The parts of a switch: title -> HTML."""
    return dict(re.findall(r"<summary[^>]*>(.*?)</summary>(.*?)</details>", text, re.DOTALL))


def text_of(part: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", part))


def texts(*outputs: tuple[Item, ...], dropped: tuple[int, ...] = ()) -> dict[str, str]:
    parts = parts_of(switch_of(*outputs, dropped=dropped))
    return {title: text_of(part) for title, part in parts.items()}


SAME = (out("step 1"), out("loss 0.5"))


@pytest.mark.parametrize(
    "outputs",
    [
        (),
        (SAME, SAME, SAME),
        (SAME, ()),
        ((out("rank 0"),), (out("rank 1"),)),
        ((Trace("E", "", "odd"),), (Trace("Released", "", "waited"),)),
    ],
    ids=["nothing", "equal", "one rank only", "a line each", "an error each"],
)
def test_equal_output_has_no_tabs(outputs: tuple[tuple[Item, ...], ...]) -> None:
    assert switch_of(*outputs) == ""


def test_ranks_that_differ_have_a_part_each_and_equal_ones_share_it() -> None:
    outputs = (SAME, SAME, (out("step 1"), out("nan")), SAME)
    assert texts(*outputs) == {"0-1,3": "step 1\nloss 0.5", "2": "step 1\nnan"}
    names = re.findall(r'<details name="([^"]*)"', switch_of(*outputs))
    assert names == ["cm-abc123"] * 2, "one is open at a time"
    assert texts(SAME, SAME, dropped=(0,))["0"].startswith("… what came before is shown above")


def test_the_switch_names_its_mesh_where_there_are_several() -> None:
    outputs = dict(enumerate((SAME, (out("step 1"), out("nan")))))
    for heading, title in (("generator:", "generator: by rank"), ("", "by rank")):
        shown = switch(outputs, (), "abc123", heading=lambda is_first, text=heading: text)
        assert f">{title}</span>" in shown


def test_different_pictures_are_worth_a_switch_however_few() -> None:
    parts = parts_of(switch_of((rich(png="AAAA"),), (rich(png="BBBB"),)))
    for title, data in (("0", "AAAA"), ("1", "BBBB")):
        assert f'src="data:image/png;base64,{data}"' in parts[title]


def test_a_gap_and_other_types_are_text() -> None:
    gap, formula = Gap(12, 3_000_000), rich(latex="$x$", plain="an object")
    text = texts((gap, formula, Line("stderr", "warning")), SAME)["0"]
    for part in ("… 12 lines (3.0 MB) not shown", "$x$", "warning"):
        assert part in text


@pytest.mark.parametrize(
    "text",
    [
        "</style><script>alert(1)</script>",
        "</pre></div></details><script>alert(1)</script>",
        "<!-- <img src=x onerror=alert(1)> \x1b[31m<b>\x1b[0m &lt; "
        "\x1b]8;;javascript:x\x07link\x1b]8;;\x07",
    ],
)
def test_text_stays_text(text: str) -> None:
    items = (out(text), Line("stderr", text), Trace("E", text, text), rich(plain=text))
    parts = parts_of(switch_of(items, SAME))
    assert set(re.findall(r"<\W*(\w+)", parts["0"])) <= {"div", "pre", "span"}
    assert text_of(parts["1"]) == "step 1\nloss 0.5"
    assert "onerror" not in str(re.findall("<[^>]*>", parts["0"]))


def test_a_display_is_its_picture_or_its_text_and_never_html_of_ranks() -> None:
    page = "</div></div></details><SCRIPT>draw()</SCRIPT>"
    drawing = rich(svg="<svg><script>alert(1)</script></svg>")
    items = (out("x"), rich(html=page, plain="<a table>"), rich(html=page, png="AAAA"), drawing)
    parts = parts_of(switch_of((*items, rich(html=page), out("y")), SAME))
    assert text_of(parts["0"]) == "x<a table>text/htmly"
    assert text_of(parts["1"]) == "step 1\nloss 0.5"
    assert re.findall(r'<img src="([^;]*);', parts["0"]) == ["data:image/png", "data:image/svg+xml"]
    assert "<script" not in parts["0"].lower()


def test_tabs_are_bounded_and_keep_the_newest_output() -> None:
    many = tuple(out(f"line {number} " + "x" * 80) for number in range(20_000))
    text = switch_of(many, many[:-1], SAME)
    assert len(text) <= LIMIT_BYTES
    parts = {title: text_of(part) for title, part in parts_of(text).items()}
    assert parts["0"].rstrip("x").endswith("line 19999 ")
    cut = "… what came before is shown above, and its text is in %dist_logs 0"
    assert parts["0"].startswith(cut)
    assert parts["2"] == "step 1\nloss 0.5", "a part that is small is whole"
    assert len(parts["0"]) > LIMIT_BYTES // 4
    pictures = tuple(rich(png="A" * 60_000 + str(number)) for number in range(5))
    text = switch_of(*((*pictures[rank:], out("end")) for rank in range(2)))
    assert len(text) <= LIMIT_BYTES
    assert re.findall(r'A(\d)"', parts_of(text)["0"]) == ["4"]
    long_line = switch_of((out("&" * 300_000),), SAME)
    assert text_of(parts_of(long_line)["0"]) == cut


def test_1000_ranks_are_too_many() -> None:
    text = switch_of(*((out("a"), out(f"{rank}")) for rank in range(1000)))
    assert len(text) <= 1.1 * LIMIT_BYTES
    assert "and 744 more: %dist_logs" in text
