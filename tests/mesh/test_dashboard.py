"""The dashboard over the Jupyter protocol, of real ranks: what is published, told, and left of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.status import rank_statuses, take_snapshot
from tests.conftest import check_nothing_left, own_runtime_dir
from tests.mesh.test_kernel import WAIT_S, Notebook, Outcome, open_notebook

_WIDGET = "application/vnd.jupyter.widget-view+json"


class FrontEnd:
    """A kernel with a mesh of two, and the dashboard that it shows."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.shown: Outcome = notebook.run("%dist_status --live")
        (self.data,) = self.shown.data()
        self.model = self.data[_WIDGET]["model_id"]

    def say(self, **content: Any) -> None:
        session = self.notebook.client.session
        data = {"method": "custom", "content": content}
        message = session.msg("comm_msg", {"comm_id": self.model, "data": data})
        self.notebook.client.shell_channel.send(message)

    def look(self, looks: bool = True, view: str = "view") -> None:
        self.say(kind="look", view=view, looks=looks)

    def wait_for(self, wanted: Callable[[str, dict[str, Any]], Any]) -> Any:
        """What `wanted` makes of the first message of which it makes anything."""
        deadline = time.monotonic() + WAIT_S
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            message = self.notebook.client.get_iopub_msg(timeout=left_s)
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_msg" and content["comm_id"] == self.model:
                kind, content = "told", content["data"].get("content", {})
            if found := wanted(kind, content):
                return found

    def wait_for_told(self, kind: str, **fields: Any) -> dict[str, Any]:
        told: dict[str, Any] = self.wait_for(
            lambda each, content: (
                content
                if each == "told"
                and content.get("kind") == kind
                and all(content[key] == value for key, value in fields.items())
                else None
            )
        )
        return told


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    with own_runtime_dir() as directory:
        with open_notebook() as notebook:
            assert notebook.run("%load_ext cellmesh\n%dist_start 2").status == "ok"
            yield FrontEnd(notebook)
            notebook.run("%dist_stop")
        check_nothing_left(directory)


def test_dashboard_is_shown_in_three_forms_with_its_ranks(front_end: FrontEnd) -> None:
    assert front_end.data["text/plain"].startswith("rank  host")
    assert "<table" in front_end.data["text/html"]
    assert "<script" not in front_end.data["text/html"]
    front_end.look()
    rows = front_end.wait_for_told("all")["rows"]
    pids = [
        front_end.notebook.run(f"mesh.report()[{rank}].pid").data("execute_result")
        for rank in (0, 1)
    ]
    assert [str(row["pid"]) for row in rows] == [data[0]["text/plain"] for data in pids]
    sample = front_end.wait_for_told("look")["sample"]
    assert all(number > 10_000_000 for number in sample["rss"])
    front_end.say(kind="open", rank=1)
    assert front_end.wait_for_told("panel")["stack"].strip() == "idle"


def test_dashboard_goes_on_after_a_restart_and_freezes_after_the_end(front_end: FrontEnd) -> None:
    front_end.look()
    before = front_end.wait_for_told("all")["rows"][1]["pid"]
    front_end.say(kind="do", action="restart")
    assert (
        "2 ranks ready in "
        in front_end.wait_for_told("told", action="restart", is_busy=False)["text"]
    )
    front_end.look(
        view="another"
    )  # which is told all: the first may have been told before what came of it
    after = front_end.wait_for(
        lambda kind, content: [
            row["pid"]
            for row in (content.get("rows", ()) if kind == "told" else ())
            if row["rank"] == 1 and row.get("pid") not in (None, 0, before)
        ]
    )
    assert after
    front_end.say(kind="do", action="stop")
    display = next(c for kind, c in front_end.shown.messages if kind == "display_data")["transient"]
    left = front_end.wait_for(
        lambda kind, content: (
            content["data"]
            if kind == "update_display_data"
            and content["transient"]["display_id"] == display["display_id"]
            else None
        )
    )
    assert _WIDGET not in left
    assert left["text/plain"].endswith("has ended (stopped)")
    assert left["text/plain"].count("idle") == 2
    assert front_end.notebook.run("%dist_start 2").status == "ok"


def test_a_notebook_that_leaves_its_mesh_says_so(front_end: FrontEnd) -> None:
    front_end.notebook.run("%dist_detach")
    again = front_end.notebook.run("%dist_attach\n%dist_status --live")
    (update,) = front_end.shown.data("update_display_data")
    assert "this notebook has left mesh-" in update["text/plain"]
    assert any(_WIDGET in data for data in again.data())


def test_a_terminal_is_shown_the_table(mesh: cm.Mesh) -> None:
    from cellmesh.magics.render.tables import Table
    from cellmesh.magics.widgets.dashboard.dashboard import show_dashboard

    table = show_dashboard(mesh)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3"]


def test_the_cpu_time_of_a_rank_is_its_own(mesh: cm.Mesh) -> None:
    session = mesh.rank_set.session
    before = take_snapshot(session)
    mesh[1].run(_compute, 0.5)
    now = take_snapshot(session)
    assert before is not None
    assert now is not None
    rows = rank_statuses(before, now)
    assert [row.doing for row in rows] == ["idle"] * 4
    used_s = [b.cpu_s - a.cpu_s for a, b in zip(before.infos, now.infos, strict=True)]
    assert used_s[1] >= 0.45
    assert sum(used_s) - used_s[1] < 0.4
    assert (rows[1].cpu or 0.0) > max(rows[rank].cpu or 0.0 for rank in (0, 2, 3))


def _compute(cpu_s: float) -> None:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
