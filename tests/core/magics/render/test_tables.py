"""Tables of ranks and of values, as text and as HTML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cellmesh.controller.inspect import compare
from cellmesh.magics.render.tables import (
    Table,
    actors_table,
    facts_table,
    join_tables,
    status_table,
)
from cellmesh.wire.inspect import TensorSummary
from cellmesh.wire.status import MemoryUse, RankInfo, RankState, WaitingCall


def info(rank: int, **changes: Any) -> RankInfo:
    fields = {"pid": 100 + rank, "host": "node", "phase": "idle", "device": "cpu"}
    return RankInfo(rank=rank, **{**fields, **changes})


def state(rank: int, run: int = -1, **changes: Any) -> RankState:
    fields: dict[str, Any] = {"execution_count": 0, "line": 0, "where": "", "collective": ""}
    return RankState(1, run, **{**fields, **changes}, device="cpu", device_bytes=0)


def tensor(**changes: Any) -> TensorSummary:
    fields: dict[str, Any] = {
        "kind": "torch.Tensor", "shape": (4, 4), "local_shape": (4, 4), "dtype": "float32",
        "device": "cpu",
        "min": 0.0, "max": 1.0, "mean": 0.5, "std": 0.25, "norm": 2.0, "digest": "aa"
    }  # fmt: skip
    return TensorSummary(**{**fields, **changes})


# ---- tables


def test_columns_line_up() -> None:
    table = Table(["a", "long header"], [["1", "2"], ["a long cell", "3"]], "that is all")
    assert repr(table) == "a            long header\n1            2\na long cell  3\nthat is all"
    assert repr(Table(["a", "b"], [])) == "a  b"


def test_html_escapes_what_users_wrote_and_notes_stand_below() -> None:
    table = Table(["<h>"], [["<script>"]], "a & b", ["one:", "    <two>"])
    assert repr(table).splitlines()[2:] == ["a & b", "one:", "    <two>"]
    html = table._repr_html_()
    for escaped in ("&lt;h&gt;", "&lt;script&gt;", "a &amp; b", "one:\n    &lt;two&gt;</pre>"):
        assert escaped in html


def test_tables_of_meshes_are_joined_under_their_names() -> None:
    tables = {
        "a": Table(["rank", "state"], [["0", "idle"]], "<a>", ["died"]),
        "b": Table(["ranks", "state"], [["0-99", "busy"]], "<b>"),
    }
    assert repr(join_tables(tables, "b")).splitlines() == [
        "mesh  rank  state  ranks",
        "a     0     idle",
        "b           busy   0-99",
        "<a>",
        "died",
        "<b>, in use",
    ]


# ---- status


def row_of(table: Table, rank: int) -> dict[str, str]:
    [row] = [row for row in table.rows if row[0] == str(rank)]
    return dict(zip(table.headers, row, strict=True))


def test_status_table_shows_what_each_rank_does() -> None:
    table = status_table(
        "a mesh",
        [
            info(0, rss_bytes=123_456_789),
            info(1),
            info(2, phase="running"),
            info(3, pid=0, phase="dead", ending="killed by SIGKILL"),
        ],
        {
            0: state(0),
            1: state(1, 7, execution_count=3, line=5, where="m.f", collective="all_reduce"),
        },
    )
    assert table.caption == "a mesh"
    assert row_of(table, 0) == {
        "rank": "0", "host": "node", "pid": "100", "device": "cpu", "state": "idle",
        "memory": "123.5 MB"
    }  # fmt: skip
    assert row_of(table, 1)["state"] == "In[3]: in all_reduce at line 5"
    silent = "running; its control thread does not answer, so a stop may not reach it"
    assert row_of(table, 2)["state"] == silent
    dead = row_of(table, 3)
    assert (dead["pid"], dead["state"], dead["memory"]) == ("-", "dead: killed by SIGKILL", "")


def many(num_ranks: int) -> tuple[list[RankInfo], dict[int, RankState]]:
    """Ranks of which 5 is dead, 17 does not answer, and 9 is at another line than the others."""
    dead = {"pid": 0, "phase": "dead", "ending": "was killed by SIGKILL"}
    infos = [
        info(rank, rss_bytes=10**8 + 10**5 * rank, **(dead if rank == 5 else {}))
        for rank in range(num_ranks)
    ]
    busy = {"execution_count": 3, "where": "m.f"}
    states = {
        rank: msgspec.structs.replace(
            state(rank, 7, **busy, line=7 if rank == 9 else 5),
            memory=MemoryUse(10**8 + 10**5 * rank, 10**9, execution_count=3),
        )
        for rank in range(num_ranks)
        if rank not in (5, 17)
    }
    return infos, states


def test_status_of_many_ranks_is_counts_and_the_few_that_differ() -> None:
    assert [row[0] for row in status_table("a mesh", *many(8)).rows] == [*"01234567"]
    table = status_table("a mesh", *many(1024))
    assert [row[0] for row in table.rows] == ["0-4,6-8,10-16,18-1023", "5", "9", "17"]
    assert table.rows[0][1] == "1,021"
    assert table.rows[0][-2:] == [
        "In[3]: running m.f at line 5",
        "100.0 MB … 202.3 MB (rank 1023)",
    ]
    assert table.rows[1][-2] == "dead: was killed by SIGKILL"
    assert "pid" not in table.headers
    assert (table.caption, table.notes) == ("a mesh", [])
    assert len(repr(table)) <= 2000


def test_the_status_shows_a_few_of_a_dead_ranks_last_lines() -> None:
    output = "\n".join(f"line {number} " + "x" * 1000 for number in range(40))
    infos = [
        info(0),
        info(1, phase="dead", pid=0, ending="was killed by SIGKILL", last_output=output),
        info(2, predecessor_ending="exited with code 3", last_output="bye"),
    ]
    table = status_table("", infos, {0: state(0), 2: state(2)})
    assert table.notes[0] == "the last lines of rank 1:"
    assert "line 35" in table.notes[1]
    assert len(table.notes) == 1 + 5 + 2
    assert max(map(len, table.notes)) < 300
    assert row_of(table, 2)["state"] == "idle; new and empty: its predecessor exited with code 3"
    assert table.notes[-2:] == ["the last lines of rank 2's predecessor:", "    bye"]
    many_dead = [info(rank, phase="dead", last_output="Killed") for rank in range(1024)]
    assert status_table("", many_dead, {}).notes[8:] == ["and those of 1020 more: `%dist_logs`"]


# ---- inspection


def test_facts_are_a_row_for_ranks_that_are_alike() -> None:
    plain = TensorSummary(kind="NoneType", text="None", digest="b")
    odd = tensor(max=9.0, digest="bb", mean=1 / 3, num_nan=2, local_shape=(2, 4), placements="S(0)")
    table = facts_table("w", {0: tensor(), 1: tensor(), 2: odd, 3: tensor(), 4: plain})
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert [row["ranks"] for row in rows] == ["0-1,3", "2", "4"]
    assert (rows[1]["mean"], rows[1]["NaN"], rows[1]["type"]) == ("0.3333", "2", "Tensor")
    assert (rows[1]["here"], rows[1]["placements"]) == ("(2, 4)", "S(0)")
    assert rows[2]["type"] == "NoneType"
    assert "None" in rows[2].values()
    table = facts_table("w", {0: tensor(), 1: tensor(digest="bb")})
    assert table.caption == "w: replicas differ: ranks 0 ≠ 1 (%dist_check measures them)"
    assert not {"placements", "here"} & set(table.headers), "columns without anything"


# ---- replicas


def facts_with(*pairs: tuple[tuple[int, ...], str]) -> dict[int, TensorSummary]:
    return {rank: tensor(shard=shard, digest=digest) for rank, (shard, digest) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (facts_with(((), "a"), ((), "a")), "replicas are equal, bit for bit"),
        (
            facts_with(((), "a"), ((), "b"), ((), "a")),
            "replicas differ: ranks 0,2 ≠ 1 (%dist_check measures them)",
        ),
        (facts_with(((0,), "a"), ((1,), "b")), "sharded: every rank holds a part of its own"),
        (
            facts_with(((-1, 0), "a"), ((-1, 1), "b"), ((-1, 0), "a"), ((-1, 1), "b")),
            "sharded; replicas are equal, bit for bit",
        ),
        (
            facts_with(((-1, 0), "a"), ((-1, 1), "b"), ((-1, 0), "x"), ((-1, 1), "b")),
            "replicas differ: ranks 0 ≠ 2 (%dist_check measures them)",
        ),
    ],
    ids=["equal", "differ", "sharded", "hybrid", "hybrid differs"],
)
def test_replicas_are_compared_in_words(facts: dict[int, TensorSummary], words: str) -> None:
    assert str(compare(facts)) == words
    # A meta or sparse tensor has values that were not looked at.
    assert "equal" not in str(compare(facts_with(((), ""), ((), ""))))


# ---- actors


def test_actors_are_shown_with_what_their_ranks_do() -> None:
    waiting = tuple(WaitingCall(run, "trainer.serve", "in sleep at In[1] line 2") for run in (5, 6))
    states = {
        0: state(0, 7, peer="scorer.score on scorer 0", line=3),
        1: state(1, waiting=waiting),
        2: state(2, 9, where="f(x)", waiting=waiting[:1]),
        3: state(3),
        4: state(4),
    }
    runs: list[Any] = [
        SimpleNamespace(number=number, title=title)
        for number, title in ((5, "trainer.serve"), (7, "trainer.step"), (9, "f"))
    ]
    actors: dict[str, Any] = {
        name: SimpleNamespace(
            kind=dict, rank_set=SimpleNamespace(ranks=ranks), lost={4}, on_death="fail"
        )
        for name, ranks in (("trainer", (0, 1, 2, 3, 4, 5)), ("train", (3,)))
    }
    table = actors_table("the mesh", actors, runs, states)
    actors["trainer"].on_death = "restart"
    again = actors_table("the mesh", actors, runs, states)
    assert "4: is being made again" in again.rows[0][-1]
    assert table.rows == [
        (
            "trainer",
            "dict",
            "0-5",
            "2",
            "0: trainer.step, waiting for scorer.score on scorer 0 at line 3 / "
            "1: trainer.serve waits in sleep at In[1] line 2 (2 calls) / "
            "2: running f(x); trainer.serve waits in sleep at In[1] line 2 / "
            "3: idle / 4: replaced, and has none / 5: dead, or does not answer",
        ),
        ("train", "dict", "3", "", "idle"),
    ]
