"""Folding loses nothing: every line of every rank is shown once, in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.controller.output.fold import HOLD_RESULT_S, HOLD_S
from cellmesh.wire.messages import Failed
from cellmesh.wire.user_code import Display, Output, Skipped

from ....support.examples import examples
from ....support.folded_reader import LONG_S, SHORT_S, Screen, as_text, display, failure

# ---- everything, once, in order

WHOLE = ["a\n", "b\n", "c\n", "a\nb\n", "10%\r20%\n", "c\r\n", "\n"]
PIECES = ["a", "b", "\r", "\n", "a\n", "\r10%", "\r20%\n", "x\ny"]
PAUSES = st.sampled_from([0.0, SHORT_S, HOLD_S * 0.6, LONG_S, LONG_S, HOLD_RESULT_S * 2])


def scripts(texts: Sequence[str]) -> st.SearchStrategy[list[list[Any]]]:
    """What each of some ranks does."""
    step = st.sampled_from([*(Output(1, "stdout", text) for text in texts), display("P")])
    last = st.sampled_from([(), (failure(),), (display("R", "result"),)])
    script = st.builds(list_of, st.lists(step, max_size=8), last)
    return st.lists(script, min_size=1, max_size=4)


def list_of(*parts: Sequence[Any]) -> list[Any]:
    return [verb for part in parts for verb in part]


def expected_of(script: Sequence[Any]) -> list[str]:
    """The items that a rank with this script causes, told without regard to other ranks or time."""
    items: list[str] = []
    rest = ""

    def after_returns(line: str) -> str:
        return ([part for part in line.split("\r") if part] or [""])[-1]

    for verb in script:
        if isinstance(verb, Output):
            *lines, rest = (rest + verb.text).replace("\r\n", "\n").split("\n")
            items += map(after_returns, lines)
            continue
        if rest:
            items.append(after_returns(rest))
            rest = ""
        items.append({Failed: "Trace", Skipped: "Gap", Display: "Rich"}[type(verb)])
    return [*items, after_returns(rest)] if rest else items


def play(screen: Screen, all_scripts: Sequence[Sequence[Any]], data: st.DataObject) -> None:
    """Let ranks say their parts, interleaved and merged in some way; then end the run."""
    left = {rank: list(script) for rank, script in enumerate(all_scripts)}
    while left:
        speaker = data.draw(st.sampled_from(sorted(left)))
        if not left[speaker]:
            del left[speaker]
            screen.leave(speaker)
            continue
        verb = left[speaker][0]
        alike = [rank for rank, script in left.items() if script and script[0] == verb]
        ranks = sorted(data.draw(st.sets(st.sampled_from(alike))) | {speaker})
        for rank in ranks:
            left[rank].pop(0)
        screen.say(ranks, verb)
        screen.wait(data.draw(PAUSES))
    screen.finish()


def check_all_shown_once(screen: Screen, all_scripts: Sequence[Sequence[Any]]) -> None:
    for rank, script in enumerate(all_scripts):
        seen = [as_text(item) for ranks, item in screen.shown if rank in ranks]
        assert seen == expected_of(script), f"rank {rank}"


@pytest.mark.parametrize("texts", [WHOLE, PIECES], ids=["whole lines", "any split of the text"])
@examples(200)
@given(data=st.data())
def test_every_line_of_every_rank_is_shown_once_in_its_order(
    texts: Sequence[str], data: st.DataObject
) -> None:
    all_scripts = data.draw(scripts(texts))
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    check_all_shown_once(screen, all_scripts)
    assert screen.folder.deadline() is None
    assert screen.folder.take(screen.now + 10, everything=True) == []
    assert not screen.has_unfinished_lines


OUT_PIECES = ["a", "b\n", "\rc", "d\r", "e\nf"]
BOTH_STREAMS = st.sampled_from(
    [
        *(Output(1, "stdout", text) for text in OUT_PIECES),
        *(Output(1, "stderr", text.upper()) for text in OUT_PIECES),
        display("P"),
        Skipped(1, 1, 10),
    ]
)


@examples(200)
@given(
    all_scripts=st.lists(st.lists(BOTH_STREAMS, max_size=8), min_size=1, max_size=3), data=st.data()
)
def test_every_line_of_each_stream_is_shown_once_in_its_order(
    all_scripts: list[list[Any]], data: st.DataObject
) -> None:
    screen = Screen(range(len(all_scripts)))
    play(screen, all_scripts, data)
    for rank, script in enumerate(all_scripts):
        seen = [as_text(item) for ranks, item in screen.shown if rank in ranks]
        for stream, is_its in (("stdout", str.islower), ("stderr", str.isupper)):
            of_stream = [
                verb for verb in script if not isinstance(verb, Output) or verb.stream == stream
            ]
            wanted = [text for text in expected_of(of_stream) if is_its(text)]
            assert [text for text in seen if is_its(text)] == wanted
        kinds = [text for text in seen if text in ("Rich", "Gap")]
        assert kinds == [
            "Rich" if isinstance(v, Display) else "Gap" for v in script if not isinstance(v, Output)
        ]


@given(
    script=scripts(PIECES).map(lambda found: found[0]), num_ranks=st.integers(1, 5), data=st.data()
)
def test_ranks_that_do_the_same_without_pauses_are_one_column(
    script: list[Any], num_ranks: int, data: st.DataObject
) -> None:
    screen = Screen(range(num_ranks))
    left = [list(script) for _ in range(num_ranks)]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in range(num_ranks) if left[rank]]))
        screen.say(rank, left[rank].pop(0))
    screen.finish()
    assert [ranks for ranks, _ in screen.shown] == [tuple(range(num_ranks))] * len(
        expected_of(script)
    )
    check_all_shown_once(screen, [script] * num_ranks)
