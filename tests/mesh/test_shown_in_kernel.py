"""Features over the Jupyter protocol: bars, questions, an inspection, a heal, the dashboard.

One kernel with three ranks; each test leaves them alive.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import check_nothing_left, clean_runtime_dir

from .test_kernel import WAIT_S, Notebook, Outcome, open_notebook

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir() as directory, open_notebook() as opened:
        assert opened.run("%load_ext cellmesh\n%dist_start 3").status == "ok"
        yield opened
        opened.run("%%dist\nw = torch.ones(2)")
        opened.run("%dist_inspect w --watch")
        stopped = opened.run("%dist_stop")
        assert stopped.status == "ok"
        assert stopped.text() == stopped.text("stderr") == ""
        check_nothing_left(directory)


# ---- bars


def area(outcome: Outcome) -> list[str]:
    """The texts in a cell's output area in the end, from top to bottom."""
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
    shown = [content["data"] for kind, content in outcome.messages if kind.endswith("display_data")]
    return [data for data in shown if data.keys() >= {"text/html", "text/plain"}]


def test_a_bar_is_one_for_all_ranks_and_moves_with_text_below(notebook: Notebook) -> None:
    outcome = notebook.run(
        "%%dist\nfrom tqdm.auto import tqdm\nimport time\nprint('before')\ndist.barrier()\n"
        "for i in tqdm(range(12), desc='moves'):\n    time.sleep(0.05)\n"
        "    if i == 8: print('within')\nprint('after')"
    )
    shown = lines(outcome)
    assert shown[0] == "[0-2] before"
    assert shown[1].startswith("[0-2] moves 100 % |██████████| 12/12"), shown
    assert {line.partition("] ")[2] for line in shown[2:]} == {"within", "after"}
    steps = [re.search(r"(\d+)(-\d+)?/12", data["text/plain"]) for data in bar_updates(outcome)]
    counts = [int(step[1]) for step in steps if step]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2
    assert "<script" not in bar_updates(outcome)[-1]["text/html"]


def test_bars_of_other_libraries_are_lines(notebook: Notebook) -> None:
    source = "%%dist\nfrom rich.progress import track\nfor i in track(range(30), 'tracked'): pass"
    shown = [line for line in lines(notebook.run(source)) if "tracked" in line]
    assert 1 <= len(shown) <= 3
    assert all("100%" in line for line in shown)


def test_the_slowest_rank_is_named_while_they_run(notebook: Notebook) -> None:
    cell = notebook.send(
        "%%dist --nowait\nimport threading\nfrom tqdm import tqdm\n"
        "with tqdm(total=100, desc='apart') as bar:\n"
        "    bar.update(10 if rank == 1 else 50)\n    bar.refresh()\n    threading.Event().wait(30)"
    )
    # A bar is first shown at 0, and not on all ranks at once.
    notebook.read_until(
        cell, lambda o: any("10-50/100" in line and "[rank 1 slowest]" in line for line in lines(o))
    )
    notebook.finish(cell)
    other = notebook.run("print('other')")  # news of the bar goes to the bar's own cell
    notebook.run("%dist_interrupt")
    ended = re.compile(r"10-50/100.*, in ")
    notebook.read_until(cell, lambda o: any(map(ended.search, lines(o))))
    assert lines(other) == ["other"]


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


# ---- questions


def asked(notebook: Notebook) -> dict[str, Any]:
    """The next input request."""
    content: dict[str, Any] = notebook.client.get_stdin_msg(timeout=WAIT_S)["content"]
    return content


def test_passwords_are_asked_in_the_cells_box_and_hidden(notebook: Notebook) -> None:
    cell = notebook.send("%%dist\nimport getpass\nprint(input('name? '), getpass.getpass())")
    assert asked(notebook) == {"prompt": "[0-2] name? ", "password": False}
    notebook.client.input("Ada")
    assert asked(notebook) == {"prompt": "[0-2] Password: ", "password": True}
    notebook.client.input("secret")
    assert notebook.finish(cell).text() == "[0-2] Ada secret\n"


def test_the_stop_button_leaves_the_debugger(notebook: Notebook) -> None:
    cell = notebook.send("%%dist\nkept = rank\nbreakpoint()\nkept = -1")
    assert asked(notebook)["prompt"] == "[0-2] (Pdb) "
    notebook.manager.interrupt_kernel()
    assert notebook.finish(cell).errors()[-1]["ename"] == "RanksInterrupted"
    assert notebook.run("%%dist\nkept == rank").text() == "[0-2] True\n"


# ---- an inspection, a heal, the dashboard


def test_an_inspection_has_a_form_for_every_viewer(notebook: Notebook) -> None:
    notebook.run("%%dist\nw = torch.arange(6.).reshape(2, 3)\nif rank == 1: w[0, 0] = float('nan')")
    for code in ("%dist_inspect w", "mesh.inspect('w')"):
        (data,) = notebook.run(code).data()
        assert data.keys() == {"text/plain", "text/html", WIDGET}
        assert "NaN on rank 1; replicas differ: ranks 0,2 ≠ 1" in data["text/plain"]
        assert "NaN on rank 1" in data["text/html"]


def refusal(notebook: Notebook, code: str) -> str:
    (error,) = notebook.run(code).errors()
    assert len(error["traceback"]) == 1
    return str(error["evalue"])


def test_heal_reports_what_was_healed_and_what_was_not(notebook: Notebook) -> None:
    nothing = "nothing to heal: every rank lives, and their process groups agree"
    assert notebook.run("%dist_heal").text().strip() == nothing
    assert "there is no rank 9: the mesh has 0-2" in refusal(notebook, "%dist_heal --from 9")
    notebook.run("%%dist\nvalue = rank")
    died = refusal(
        notebook, "%%dist --ranks 1\nimport os\nos.system('echo last words >&2')\nos._exit(3)"
    )
    assert "rank 1 exited with code 3" in died
    status = notebook.run("%dist_status").data("execute_result")[0]
    for kind in ("text/plain", "text/html"):
        assert "dead: exited with code 3" in status[kind]
        assert "last words" in status[kind], status[kind]
    assert "nothing can run on rank 1" in refusal(notebook, "%%dist\nvalue")
    assert "rank 1 is dead" in refusal(notebook, "%dist_heal --from 1")
    assert "rank 1 is new and empty" in notebook.run("%dist_heal").text()
    copies = "rank 1 is new and empty (`%dist_heal --from 0` copies from a rank)"
    assert notebook.run("%dist_heal").text().strip() == f"{nothing}; {copies}"
    assert "rank 1 is dead or new, and holds nothing" in refusal(notebook, "%dist_heal --from 1")
    assert "copied: " in notebook.run("%dist_heal --from 2").text()
    assert notebook.run("%%dist\nvalue").text() == "[0] 0\n[1-2] 2\n"


class Dashboard:
    """The dashboard that a kernel shows, as a page has it."""

    def __init__(self, notebook: Notebook, options: str = "") -> None:
        self._notebook = notebook
        self.shown = notebook.run(f"%dist_status --live {options}")
        (self.data,) = self.shown.data()
        self._model = self.data[WIDGET]["model_id"]

    def send(self, **content: Any) -> None:
        data = {"method": "custom", "content": content}
        message = {"comm_id": self._model, "data": data}
        client = self._notebook.client
        client.shell_channel.send(client.session.msg("comm_msg", message))

    def wait_for(self, wanted: Callable[[str, dict[str, Any]], Any]) -> Any:
        """The first value that is true of messages; of the widget's state what is new."""
        deadline = time.monotonic() + WAIT_S
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            message = self._notebook.client.get_iopub_msg(timeout=left_s)
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_msg" and content["comm_id"] == self._model:
                kind, content = "state", content["data"].get("state", {})
            if found := wanted(kind, content):
                return found

    def wait_for_state(self, name: str) -> Any:
        """The next value of one of the widget's traits."""
        return self.wait_for(lambda kind, content: kind == "state" and content.get(name))


def test_dashboard_shows_ranks_restarts_them_and_freezes_after_the_end(notebook: Notebook) -> None:
    dashboard = Dashboard(notebook)
    assert dashboard.data["text/plain"].startswith("rank  host")
    assert "<script" not in dashboard.data["text/html"]
    assert dashboard.data["text/plain"].count("idle") == 3
    dashboard.send(kind="look")
    assert dashboard.wait_for_state("looked_at")
    notebook.run("%%dist\nx = 1")
    dashboard.send(kind="do", action="restart")
    while "3 ranks ready in " not in dashboard.wait_for_state("told")["text"]:
        pass
    assert notebook.run("%%dist\nassert 'x' not in globals()").status == "ok"
    notebook.send("%dist_stop")
    shown = next(content for kind, content in dashboard.shown.messages if kind == "display_data")
    left = dashboard.wait_for(
        lambda kind, content: (
            kind == "update_display_data"
            and content["transient"] == shown["transient"]
            and content["data"]
        )
    )
    assert WIDGET not in left
    assert left["text/plain"].endswith("has ended (stopped)")
    assert notebook.run("%dist_start 3").status == "ok"
