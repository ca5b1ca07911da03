"""The dashboard over the Jupyter protocol, of real ranks: what is published, told, and left of
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cellmesh as cm
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

    def look(self) -> None:
        self.say(kind="look")

    def wait_for(self, wanted: Callable[[str, dict[str, Any]], Any]) -> Any:
        """What `wanted` makes of the first message of which it makes anything; of the widget's
        state it is given what is new.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            left_s = max(0.1, deadline - time.monotonic())
            message = self.notebook.client.get_iopub_msg(timeout=left_s)
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_msg" and content["comm_id"] == self.model:
                kind, content = "state", content["data"].get("state", {})
            if found := wanted(kind, content):
                return found

    def wait_for_state(self, name: str, is_it: Callable[[Any], Any]) -> Any:
        """The first value of one of the widget's traits of which this holds."""
        return self.wait_for(
            lambda kind, content: (
                [content[name]]
                if kind == "state" and name in content and is_it(content[name])
                else None
            )
        )[0]


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
    table = front_end.wait_for_state("table", lambda table: True)
    assert table.count('data-doing="idle"') == 2
    assert table.count(" MB</div>") == 2


def test_dashboard_goes_on_after_a_restart_and_freezes_after_the_end(front_end: FrontEnd) -> None:
    front_end.look()
    front_end.wait_for_state("looked_at", bool)
    front_end.notebook.run("%%dist\nx = 1")
    front_end.say(kind="do", action="restart")
    front_end.wait_for_state("told", lambda told: "2 ranks ready in " in told["text"])
    front_end.look()
    front_end.wait_for_state("looked_at", bool)
    assert front_end.notebook.run("%%dist\nassert 'x' not in globals()").status == "ok"
    front_end.notebook.send("%dist_stop")
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
