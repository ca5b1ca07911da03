"""The switch to one rank's output: when there is one, what is in it, and that nothing breaks out of
it.
"""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from cellmesh.controller.output.fold import Gap, Item, Line, Rich, Trace
from cellmesh.controller.output.mime_bundle import balance
from cellmesh.controller.output.rank_tabs import LIMIT_BYTES, switch

from ....support import blocks


def out(text: str) -> Line:
    return Line("stdout", text)


def err(text: str) -> Line:
    return Line("stderr", text)


def rich(**data: Any) -> Rich:
    item = blocks.rich(**data).item
    assert isinstance(item, Rich)
    return item


class Tabs(HTMLParser):
    """The parts of a switch as a browser would see them: title -> text, and its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: dict[str, str] = {}
        self.elements: dict[str, list[tuple[str, dict[str, str | None]]]] = {}
        self.names: set[str | None] = set()
        self.is_balanced = True
        self._path: list[str] = []
        self._title = ""
        self.feed(text)
        self.close()
        self.is_balanced = self.is_balanced and self._path == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "details":
            self._title = ""
            self.names.add(dict(attrs)["name"])
        elif self._title:
            self.elements[self._title].append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self._path.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("img", "br"):
            return
        self.is_balanced = self.is_balanced and self._path[-1:] == [tag]
        self._path.pop()
        if tag == "details":
            self._title = ""

    def handle_data(self, data: str) -> None:
        if self._path[-1:] == ["summary"]:
            self._title = data
            self.parts[data], self.elements[data] = "", []
        elif self._title:
            self.parts[self._title] += data


def switch_of(*outputs: tuple[Item, ...], dropped: tuple[int, ...] = (), **options: Any) -> str:
    """The switch between ranks 0, 1, ... with these outputs."""
    return switch(dict(enumerate(outputs)), dropped, "abc123", **options)


def tabs(*outputs: tuple[Item, ...]) -> Tabs:
    parsed = Tabs(switch_of(*outputs))
    assert parsed.is_balanced
    return parsed


SAME = (out("step 1"), out("loss 0.5"))


# ---- when


@pytest.mark.parametrize(
    "outputs",
    [
        (),
        ((), ()),
        (SAME, SAME, SAME),
        (SAME, ()),
        ((out("rank 0"),), (out("rank 1"),)),
        ((Trace("E", "", "odd"),), (Trace("Released", "", "waited"),)),
    ],
    ids=["nothing", "silent", "equal", "one rank only", "a line each", "an error each"],
)
def test_equal_output_has_no_tabs(outputs: tuple[tuple[Item, ...], ...]) -> None:
    assert switch_of(*outputs) == ""


def test_ranks_that_differ_have_a_part_each_and_equal_ones_share_it() -> None:
    found = tabs(SAME, SAME, (out("step 1"), out("nan")), SAME)
    assert found.parts == {"0-1,3": "step 1\nloss 0.5", "2": "step 1\nnan"}
    assert found.names == {"cm-abc123"}, "one is open at a time"
    lost = Tabs(switch_of(SAME, SAME, dropped=(0,))).parts
    assert lost["0"].startswith("… what came before is shown above")


def test_different_pictures_are_worth_a_switch_however_few() -> None:
    found = tabs((rich(png="AAAA", plain="<Figure>"),), (rich(png="BBBB", plain="<Figure>"),))
    assert [dict(found.elements[title])["img"]["src"] for title in ("0", "1")] == [
        "data:image/png;base64,AAAA",
        "data:image/png;base64,BBBB",
    ]


# ---- what


def test_a_gap_and_other_types_are_text() -> None:
    items = (Gap(12, 3_000_000), rich(json={"a": 1}), rich(latex="$x$"), err("warning"))
    text = tabs(items, SAME).parts["0"]
    for part in ("… 12 lines (3.0 MB) not shown", '"a": 1', "$x$", "warning"):
        assert part in text


# ---- nothing breaks out


HOSTILE = [
    "</style><script>alert(1)</script>",
    "</pre></div></details><script>alert(1)</script>",
    "<!-- <img src=x onerror=alert(1)> \x1b[31m<b>\x1b[0m &lt; "
    "\x1b]8;;javascript:x\x07link\x1b]8;;\x07",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str) -> None:
    found = tabs((out(text), err(text), Trace("E", text, text), rich(plain=text)), SAME)
    assert {tag for tag, _ in found.elements["0"]} <= {"div", "pre", "span"}
    assert found.parts["1"] == "step 1\nloss 0.5"
    assert "onerror" not in str(found.elements)


@pytest.mark.parametrize(
    "text",
    [
        "</div></div></details><b>out",
        "<table><tr><td>1",
        "<div title='</div>'><p>a</i></p>",
        "a < b",
    ],
)
def test_html_ends_where_it_ends(text: str) -> None:
    found = tabs((out("x"), rich(html=text, plain="p"), out("y")), SAME)
    assert found.parts["0"].endswith("y")
    assert found.parts["1"] == "step 1\nloss 0.5"


def test_html_that_runs_is_shown_as_what_else_there_is() -> None:
    page = "<div id='plot'></div><SCRIPT>draw()</SCRIPT>"
    drawing = rich(svg="<svg><script>alert(1)</script></svg>")
    items = (out("x"), rich(html=page, plain="a figure"), rich(html=page, png="AAAA"), drawing)
    found = tabs(items, SAME)
    assert "a figure" in found.parts["0"]
    sources = [str(attrs["src"])[:14] for tag, attrs in found.elements["0"] if tag == "img"]
    assert sources == ["data:image/png", "data:image/svg"]
    assert "script" not in dict(found.elements["0"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<img src=x onerror=alert(1)>", '<img src="x">'),
        ("<svg/onload=alert(1)></svg>", "<svg></svg>"),
        ("<a href='javascript:alert(1)' ONCLICK='x'>x</a>", "<a>x</a>"),
        ("<a href=' jav&#9;aScript&colon;x'>x</a>", "<a>x</a>"),
        ("<input formaction='javascript:x'>", "<input>"),
        (
            "<p srcdoc='<script>x</script>' title='&quot;><b>'>",
            '<p title="&quot;&gt;&lt;b&gt;"></p>',
        ),
        (
            "<svg><style><img src=x onerror=alert(1)></style></svg>",
            "<svg><style>&lt;img src=x onerror=alert(1)></style></svg>",
        ),
        (
            "<a href='https://example.org/?a=1&amp;b'>x</a>",
            '<a href="https://example.org/?a=1&amp;b">x</a>',
        ),
    ],
)
def test_html_output_runs_no_script(text: str, left: str) -> None:
    assert balance(text) == left


# ---- how much


def test_tabs_are_bounded_and_keep_the_newest_output() -> None:
    many = tuple(out(f"line {number} " + "x" * 80) for number in range(20_000))
    text = switch_of(many, many[:-1], SAME)
    assert len(text) <= LIMIT_BYTES
    parts = Tabs(text).parts
    assert parts["0"].rstrip("x").endswith("line 19999 ")
    cut = "… what came before is shown above, and its text is in %dist_logs 0"
    assert parts["0"].startswith(cut)
    assert parts["2"] == "step 1\nloss 0.5", "a part that is small is whole"
    assert len(parts["0"]) > LIMIT_BYTES // 4
    pictures = tuple(rich(png="A" * 60_000 + str(number)) for number in range(5))
    text = switch_of(*((*pictures[rank:], out("end")) for rank in range(2)))
    assert len(text) <= LIMIT_BYTES
    [(_, attrs)] = [each for each in Tabs(text).elements["0"] if each[0] == "img"]
    assert str(attrs["src"]).endswith("4")


def test_one_long_line_keeps_its_end_and_no_half_of_an_entity() -> None:
    text = switch_of((out("&" * 300_000 + "end"),), SAME)
    assert len(text) <= LIMIT_BYTES
    assert Tabs(text).parts["0"].endswith("&&&end")
    assert "ogs 0</code></div><pre" in text
    kept = text.partition("</code></div>")[2].partition(">")[2]
    assert not kept.startswith(("amp;", "mp;", "p;", ";"))


def test_1000_ranks_are_too_many() -> None:
    text = switch_of(*((out("a"), out(f"{rank}")) for rank in range(1000)))
    assert len(text) <= 1.1 * LIMIT_BYTES
    assert "and 744 more: %dist_logs" in text
