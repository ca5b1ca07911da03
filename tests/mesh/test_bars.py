"""Progress bars in cells on real ranks, as a kernel's front end gets them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import Notebook, Outcome, open_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh").status == "ok"
            assert opened.run("%dist_start 3").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
            check_nothing_left(directory)
        check_nothing_left(directory)


def area(outcome: Outcome) -> list[str]:
    """What stands in a cell's output area in the end, as text, from top to bottom."""
    places: dict[str, int] = {}
    shown: list[str] = []
    for kind, content in outcome.messages:
        display_id = content.get("transient", {}).get("display_id")
        if kind == "stream":
            shown.append(content["text"])
        elif kind == "display_data":
            places[display_id] = len(shown)
            shown.append(content["data"].get("text/plain", ""))
        elif kind == "update_display_data":
            shown[places[display_id]] = content["data"].get("text/plain", "")
    return [text.rstrip("\n") for text in shown if text.strip()]


def lines(outcome: Outcome) -> list[str]:
    return [line for text in area(outcome) for line in text.split("\n")]


def bar_updates(outcome: Outcome) -> list[dict[str, Any]]:
    """What is drawn of bars; the line that tells of a cell which takes long is text only."""
    shown = [content for kind, content in outcome.messages if kind.endswith("display_data")]
    return [content for content in shown if content["data"].keys() >= {"text/html", "text/plain"}]


FINISHED = [
    ("from tqdm import tqdm\nfor i in tqdm(range(30), desc='plain'): pass", "plain"),
    ("from tqdm.auto import tqdm\nfor i in tqdm(range(30), desc='auto'): pass", "auto"),
    ("from tqdm.notebook import tqdm\nfor i in tqdm(range(30), desc='widget'): pass", "widget"),
    (
        "import asyncio\nfrom tqdm.asyncio import tqdm\n"
        "await tqdm.gather(*[asyncio.sleep(0) for i in range(30)], desc='gathered')",
        "gathered",
    ),
    ("import sys\nfor i in tqdm(range(30), desc='stdout', file=sys.stdout): pass", "stdout"),
]


@pytest.mark.parametrize(("source", "title"), FINISHED, ids=[title for _, title in FINISHED])
def test_every_kind_of_bar_is_one_for_all_ranks(
    notebook: Notebook, source: str, title: str
) -> None:
    outcome = notebook.run(f"%%dist\nfrom tqdm import tqdm\n{source};")
    assert outcome.status == "ok", outcome
    (line,) = [line for line in lines(outcome) if "None" not in line and "[None" not in line]
    assert line.startswith(f"[0-2] {title} 100 % |██████████| 30/30"), line
    html = bar_updates(outcome)[-1]["data"]["text/html"]
    assert "<script" not in html
    assert title in html


def test_a_bar_moves_while_the_cell_runs_and_text_stands_below_it(notebook: Notebook) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm\nimport time\nprint('before')\ndist.barrier()\n"
        "for i in tqdm(range(12), desc='moves'):\n    time.sleep(0.05)\n"
        "    if i == 8: print('within')\nprint('after')"
    )
    outcome = notebook.run(source)
    shown = area(outcome)
    assert [re.sub(r"\[.*?\] ", "", text.split("\n")[0])[:6] for text in shown][:2] == [
        "before",
        "moves ",
    ]
    assert {line.partition("] ")[2] for text in shown[2:] for line in text.split("\n")} == {
        "within",
        "after",
    }
    steps = [re.search(r"(\d+)(-\d+)?/12", c["data"]["text/plain"]) for c in bar_updates(outcome)]
    counts = [int(step[1]) for step in steps if step]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert counts[-1] == 12


def test_nested_bars_and_notes(notebook: Notebook) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm, trange\n"
        "for epoch in trange(2, desc='epoch'):\n"
        "    bar = tqdm(range(5), desc=f'batches of {epoch}')\n"
        "    for i in bar: bar.set_postfix(loss=epoch + rank)\n"
        "for i in tqdm(range(3), desc='gone', leave=False): pass"
    )
    shown = lines(notebook.run(source))
    assert [re.split(r"\s+\d+ %", line)[0] for line in shown] == [
        "[0-2] epoch",
        "[0-2]   batches of 0",
        "[0-2]   batches of 1",
    ]
    assert shown[1].endswith("loss=0 … 2")
    assert shown[2].endswith("loss=1 … 3 (rank 2)")


def test_bars_of_other_libraries_are_lines(notebook: Notebook) -> None:
    source = "%%dist\nfrom rich.progress import track\nfor i in track(range(30), 'tracked'): pass"
    shown = [line for line in lines(notebook.run(source)) if "tracked" in line]
    assert 1 <= len(shown) <= 3
    assert all("100%" in line for line in shown)


def test_the_slowest_rank_is_named_while_they_run(notebook: Notebook) -> None:
    gate = "%%dist\nimport threading\nfrom tqdm import tqdm\ngate = threading.Event()"
    assert notebook.run(gate).status == "ok"
    cell = notebook.send(
        "%%dist --nowait\nwith tqdm(total=100, desc='apart') as bar:\n"
        "    bar.update(10 if rank == 1 else 50)\n    bar.refresh()\n    gate.wait(30)"
    )
    # A bar is first shown at 0, and not on all ranks at once.
    notebook.read_until(
        cell, lambda o: any("10-50/100" in line and "[rank 1 slowest]" in line for line in lines(o))
    )
    notebook.finish(cell)
    # Another cell runs meanwhile, on the kernel; what is said of the bar goes to the bar's own
    # cell.
    other = notebook.run("print('other')")
    notebook.run("%dist_interrupt")
    outcome = notebook.read_until(cell, lambda o: any("[interrupted]" in line for line in lines(o)))
    assert lines(other) == ["other"]
    assert "#d08700" in bar_updates(outcome)[-1]["data"]["text/html"]


def test_a_bar_of_a_cell_that_fails_says_whose_fault_it_is(notebook: Notebook) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm\n"
        "def train():\n    for i in tqdm(range(100), desc='fails'):\n"
        "        if i == 40 and rank == 2: raise ValueError('no')\n"
        "        if i == 60: break\n"
        "train()\ndist.barrier()"
    )
    outcome = notebook.run(source)
    assert outcome.status == "error"
    (line,) = [line for line in lines(outcome) if "fails" in line and "%" in line]
    assert "40-60/100" in line
    assert "[rank 2 failed]" in line
    html = bar_updates(outcome)[-1]["data"]["text/html"]
    assert "#e5484d" in html


def test_bars_open_when_a_cell_failed_are_marked(notebook: Notebook) -> None:
    outcome = notebook.run(
        "%%dist\nfrom tqdm import tqdm\n"
        "bar = tqdm(total=10, desc='left open'); bar.update(4)\nraise ValueError('no')"
    )
    assert outcome.status == "error"
    (line,) = [line for line in lines(outcome) if "left open" in line and "%" in line]
    assert "4/10" in line
    assert "failed]" in line


def test_text_written_past_a_bar_is_whole(notebook: Notebook) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm\nfor i in tqdm(range(3), "
        "desc='writes'):\n    tqdm.write(f'line {i}')"
    )
    shown = lines(notebook.run(source))
    assert [line for line in shown if "writes" not in line] == [
        "[0-2] line 0",
        "[0-2] line 1",
        "[0-2] line 2",
    ]


def test_a_flood_of_bars_is_few_messages(notebook: Notebook) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm\nfor i in range(2000):\n"
        "    for j in tqdm(range(3), desc='short', leave=i == 1999): pass"
    )
    outcome = notebook.run(source)
    assert outcome.status == "ok"
    assert len(bar_updates(outcome)) < 200
    assert [line for line in lines(outcome) if "3/3" in line]


def test_a_forced_redraw_a_step_is_few_messages_and_the_last_one_arrives(
    notebook: Notebook,
) -> None:
    source = (
        "%%dist\nfrom tqdm import tqdm\nbar = tqdm(total=20000, desc='forced', mininterval=0)\n"
        "for i in range(20000):\n    bar.update(); bar.set_postfix(step=i)\nbar.close()"
    )
    outcome = notebook.run(source)
    (line,) = lines(outcome)
    assert "20,000/20,000" in line
    assert line.endswith("step=2e+4")
    assert len(bar_updates(outcome)) < 200


def test_a_bar_that_outlives_its_cell_goes_on_there(notebook: Notebook) -> None:
    first = notebook.send(
        "%%dist\nfrom tqdm import tqdm\nbar = tqdm(total=10, desc='long'); bar.update(3)"
    )
    notebook.finish(first)
    assert "3/10" in lines(notebook.cells[first])[0]
    second = notebook.run("%%dist\nbar.update(7); bar.close()")
    outcome = notebook.read_until(first, lambda o: "10/10" in lines(o)[0])
    assert len(lines(outcome)) == 1
    assert area(second) == []


def test_bars_of_a_process_that_a_cell_starts_leave_no_escapes(notebook: Notebook) -> None:
    script = (
        "import time; from tqdm import trange\n"
        "for i in trange(2, desc='outer', ncols=60):\n"
        "    for j in trange(3, desc='inner', leave=False, ncols=60): time.sleep(0.1)"
    )
    outcome = notebook.run(
        "%%dist --ranks 1\nimport subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {script!r}], check=True);"
    )
    shown = lines(outcome)
    assert "\x1b" not in "".join(shown)
    assert any("outer: 100%" in line for line in shown)
    assert len(shown) <= 3


def test_bars_of_a_rank_that_dies_say_how(notebook: Notebook) -> None:
    outcome = notebook.run(
        "%%dist\nfrom tqdm import tqdm\nimport os, signal\nbar = tqdm(total=100, desc='dies')\n"
        "bar.update(30); bar.refresh()\ndist.barrier()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    assert outcome.status == "error"
    (line,) = [line for line in lines(outcome) if "dies" in line and "%" in line]
    assert re.search(r"\[rank 1 [^,]*SIGKILL[^,]*, ranks 0,2 stopped\]", line), line
    healed = notebook.run("%dist_heal")
    assert healed.status == "ok", healed
