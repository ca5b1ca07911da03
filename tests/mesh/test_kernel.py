"""The magics in a real kernel, over the Jupyter protocol, as any front end speaks it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.conftest import check_nothing_left, clean_runtime_dir, kernel_config

WAIT_S = 100.0


@dataclass
class Outcome:
    """What a cell sent."""

    status: str = ""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def text(self, name: str = "stdout") -> str:
        return "".join(
            c["text"] for kind, c in self.messages if kind == "stream" and c["name"] == name
        )

    def data(self, kind: str = "display_data") -> list[dict[str, Any]]:
        return [content["data"] for each, content in self.messages if each == kind]

    def errors(self) -> list[dict[str, Any]]:
        return [content for kind, content in self.messages if kind == "error"]


class Notebook:
    """A kernel and its client; messages are kept by the cell that they belong to."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)
        self.cells: dict[str, Outcome] = {}

    def send(self, code: str) -> str:
        # Some kernels answer 'aborted' to a cell that is sent right after one that failed.
        identity = self.client.execute(code, stop_on_error=False)
        self.cells[identity] = Outcome()
        return str(identity)

    def read_until(self, cell: str, done: Any) -> Outcome:
        deadline = time.monotonic() + WAIT_S
        while not done(self.cells[cell]):
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            outcome = self.cells.get(message["parent_header"].get("msg_id", ""))
            if outcome is None:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                outcome.status = "idle"
            else:
                outcome.messages.append((message["msg_type"], content))
        return self.cells[cell]

    def finish(self, cell: str) -> Outcome:
        outcome = self.read_until(cell, lambda o: o.status == "idle")
        reply = self.client.get_shell_msg(timeout=WAIT_S)
        while reply["parent_header"].get("msg_id") != cell:
            reply = self.client.get_shell_msg(timeout=WAIT_S)
        outcome.status = reply["content"]["status"]
        return outcome

    def run(self, code: str) -> Outcome:
        return self.finish(self.send(code))

    def is_idle(self) -> bool:
        """Whether every cell that was sent has been answered."""
        return all(outcome.status not in ("", "idle") for outcome in self.cells.values())


@contextlib.contextmanager
def open_notebook(cwd: Path | None = None) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3", config=kernel_config())
    manager.start_kernel(cwd=str(cwd or Path.cwd()))
    try:
        notebook = Notebook(manager)
        yield notebook
        notebook.client.stop_channels()
    finally:
        manager.shutdown_kernel(now=False)
        manager.cleanup_resources()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir() as directory, open_notebook() as opened:
        assert opened.run("%load_ext cellmesh").status == "ok"
        assert opened.run("%dist_start 3").status == "ok"
        yield opened
        assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_cell_runs_on_all_ranks_and_is_folded(notebook: Notebook) -> None:
    outcome = notebook.run("%%dist\nprint('hi')\nprint('rank', rank)")
    assert outcome.status == "ok"
    assert outcome.text().splitlines() == ["[0-2] hi", "[0-2] rank 0 … 2"]


def test_a_cell_is_given_arguments_also_in_auto_mode(notebook: Notebook) -> None:
    read = "import sys; print(sys.argv)"
    notebook.run("lr = 0.1\n%dist_auto on")
    given = notebook.run(f"%%dist --argv \"--lr {{lr}} --name 'a b'\"\n{read}").text()
    plain_cell = notebook.run(read).text()
    notebook.run("%dist_auto off")
    assert given == "[0-2] ['cell', '--lr', '0.1', '--name', 'a b']\n"
    assert plain_cell == "[0-2] ['cell']\n"
    refused = notebook.run("%%dist --argv --lr 0.1\npass").errors()[-1]["evalue"]
    assert "put what follows --argv into quotes, like --argv '--lr 0.1'" in refused


def test_nowait_returns_a_run_and_output_follows(notebook: Notebook) -> None:
    cell = notebook.send(
        "%%dist --nowait\nimport threading; gate = threading.Event(); gate.wait(20); print('done')"
    )
    outcome = notebook.finish(cell)
    assert "waits for ranks 0-2" in outcome.data("execute_result")[0]["text/plain"]
    # Ranks are busy: what is sent now waits its turn, and inspection does not.
    table = notebook.run("%dist_inspect rank").data()[0]["text/plain"]
    assert "int" in table
    status = notebook.run("%dist_status").data("execute_result")[0]
    assert "running" in status["text/plain"]
    assert "<table" in status["text/html"]
    notebook.run("%dist_interrupt")
    notebook.read_until(cell, lambda o: any("KeyboardInterrupt" in e["ename"] for e in o.errors()))
    debug = notebook.run("%dist_status --debug").data("execute_result")[0]["text/plain"]
    assert re.search(r"\nagent: process \d+ on this machine\n", debug)
    assert re.search(r"s ago  run \d+ \(.+\): running -> aligning \(interrupted\)\n", debug)
    assert "recovery: calm -> examining (trouble)" in debug


def test_an_error_fails_the_cell_with_the_notebooks_line_numbers(notebook: Notebook) -> None:
    outcome = notebook.run("%%dist\nx = 1\nif rank == 1:\n    raise ValueError('boom')")
    assert outcome.status == "error"
    shown, raised = outcome.errors()
    assert shown["ename"] == "[1] ValueError"
    text = plain("\n".join(shown["traceback"]))
    number = re.search(r"In\[(\d+)\], line 4", text)
    assert number, text
    echo = next(c for kind, c in outcome.messages if kind == "execute_input")
    assert int(number.group(1)) == echo["execution_count"]
    assert raised["ename"] == "RankFailure"
    assert "rank 1 raised ValueError: boom (line 4); ranks 0,2 finished" in raised["evalue"]
    assert len(raised["traceback"]) == 1


def test_rank_failures_can_be_caught_by_type(notebook: Notebook) -> None:
    outcome = notebook.run(
        "from cellmesh import RankFailure\n"
        "try:\n    get_ipython().run_cell_magic('dist', '', '1/0')\n"
        "except* ZeroDivisionError as group:\n    print(len(group.exceptions), 'of them')"
    )
    assert "3 of them" in outcome.text()
    assert outcome.status == "ok"


def test_a_syntax_error_is_reported_once_and_at_its_line(notebook: Notebook) -> None:
    outcome = notebook.run("%%dist\nx = 1\ndef f(:")
    assert outcome.status == "error"
    (error,) = outcome.errors()
    assert error["ename"] in ("SyntaxError", "CellSyntaxError")
    assert ":3" in plain("\n".join(error["traceback"])) or "line 3" in error["evalue"]
    assert "cellmesh/" not in "\n".join(error["traceback"])


def test_values_are_pushed_and_pulled(notebook: Notebook) -> None:
    assert notebook.run("alpha = {'a': [1, 2]}\n%dist_push alpha").status == "ok"
    notebook.run("%%dist\nbeta = [rank, alpha['a']]")
    notebook.run("%dist_pull beta --all\nprint(beta)")
    assert (
        notebook.run("print(beta)").text()
        == "Results({0: [0, [1, 2]], 1: [1, [1, 2]], 2: [2, [1, 2]]})\n"
    )
    notebook.run("%dist_pull beta --rank 2 --as gamma")
    assert notebook.run("print(gamma)").text() == "[2, [1, 2]]\n"
    assert notebook.run("%dist_pull beta[0] + 1").data("execute_result")[0]["text/plain"] == "1"


SHOWS = """
import sys
from IPython.display import HTML, display
print('out')
print('err', file=sys.stderr)
display(HTML('<b>rich</b>'))
for i in range(20_000): pass
print('last')
"""


@pytest.mark.parametrize(
    "code",
    [
        f"%%capture seen\n%%dist{SHOWS}",
        "from IPython.utils.capture import capture_output\n"
        f"with capture_output() as seen:\n    mesh.cell({SHOWS!r})",
    ],
    ids=["a magic", "a call"],
)
def test_a_cell_of_ranks_is_captured(notebook: Notebook, code: str) -> None:
    outcome = notebook.run(code)
    assert outcome.status == "ok"
    assert [kind for kind, _ in outcome.messages if kind in ("stream", "display_data")] == []
    assert notebook.run("print(seen.stdout, end='')").text().splitlines()[:2] == [
        "[0-2] out",
        "[0-2] last",
    ]
    assert notebook.run("print(seen.stderr, end='')").text() == "[0-2] err\n"
    label, shown = notebook.run("for output in seen.outputs: display(output)").data()
    assert label["text/plain"] == "[0-2]"
    assert shown["text/html"] == "<b>rich</b>"


def test_auto_mode_sends_cells_to_the_ranks(notebook: Notebook) -> None:
    notebook.run("%dist_auto on")
    try:
        assert notebook.run("print('on', world_size)").text() == "[0-2] on 3\n"
        assert notebook.run("%%local\nprint('here')").text() == "here\n"
        mixed = notebook.run("x = 1\n%dist_status")
        assert "cell of its own" in mixed.errors()[0]["evalue"]
    finally:
        notebook.run("%dist_auto off")
    assert notebook.run("print('off')").text() == "off\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%%dist --rnks 1\npass", "Did you mean --ranks"),
        ("%%dist --ranks 9\npass", "no rank 9: the mesh has ranks 0-2"),
        ("%dist_mesh dp=2", "makes 2 ranks, and the mesh has 3"),
        ("%dist_push alhpa", "did you mean 'alpha'"),
        ("%dist_pull x --gather --all", "--gather and --reduce take all ranks"),
        ("%dist print(1)", "%%dist"),
        ("%%dist_profile --row 3\npass", "Did you mean --rows?"),
        ("%dist_timeline --cell 1", "Did you mean --cells?"),
        ("%dist_plot", "Missing argument"),
    ],
)
def test_wrong_calls_name_the_right_one(notebook: Notebook, code: str, words: str) -> None:
    outcome = notebook.run(code)
    assert outcome.status == "error"
    evalue = outcome.errors()[-1]["evalue"]
    # Not every version of click has the quotes.
    assert words in evalue or words in evalue.replace("'", "")
    assert len(outcome.errors()[-1]["traceback"]) == 1


def test_the_stop_button_gets_ranks_out_of_a_collective(notebook: Notebook) -> None:
    late = "if rank == 0:\n    print('late', flush=True)\n    import time; time.sleep(1000)"
    cell = notebook.send(f"%%dist\n{late}\ndist.barrier()")
    notebook.read_until(cell, lambda outcome: "late" in outcome.text())
    notebook.manager.interrupt_kernel()
    outcome = notebook.finish(cell)
    assert outcome.status == "error"
    assert (
        "ranks 1-2 raised KeyboardInterrupt: interrupted in barrier"
        in outcome.errors()[-1]["evalue"]
    )
    assert (
        notebook.run("%%dist\nt = torch.ones(1); dist.all_reduce(t); t.item()").text()
        == "[0-2] 3.0\n"
    )


def test_without_a_lease_nothing_is_left_when_the_kernel_is_killed(runtime_dir: Path) -> None:
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh")
        refused = opened.run("%%dist\npass").errors()[0]["evalue"]
        assert "no mesh is running: start one with `%dist_start 4`" in refused
        assert opened.run("%dist_start 2 --lease 0").status == "ok"
        opened.client.stop_channels()
        opened.manager.restart_kernel(now=True)
        check_nothing_left(runtime_dir)
        opened.client = opened.manager.blocking_client()
        opened.client.start_channels()
        opened.client.wait_for_ready(timeout=WAIT_S)


VIEW = "application/vnd.jupyter.widget-view+json"


def test_a_plot_has_a_form_for_every_viewer_and_follows_at_a_cells_end(notebook: Notebook) -> None:
    logged = notebook.run(
        "%%dist\nimport cellmesh as cm\nfor i in range(9): cm.log(loss=i, step=i)"
    )
    assert logged.status == "ok"
    (data,) = notebook.run("%dist_plot loss").data()
    assert data.keys() == {"text/plain", "text/html", VIEW}
    assert "loss [1] 9 points, last 8, least 0, most 8" in data["text/plain"]
    assert '<img class="cellmesh-plot"' in data["text/html"]
    shown = notebook.send("%dist_plot later")
    (data,) = notebook.finish(shown).data()
    assert "nothing logged yet" in data["text/plain"]
    assert notebook.run("%%dist\ncm.log(later=3.5)\n1 / 0").status == "error"  # failed or not
    text = "later [0] 1 points, last 3.5"
    notebook.read_until(
        shown, lambda o: any(text in d["text/plain"] for d in o.data("update_display_data"))
    )
    (error,) = notebook.run("%%dist --ranks 0\ncm.log(loss='high')").errors()[:1]
    assert "cellmesh.log(loss=...): str is no number" in plain("\n".join(error["traceback"]))
    assert notebook.run("import cellmesh\ncellmesh.log(loss='anything')").status == "ok"


def test_a_cell_is_profiled_and_drawn_also_where_it_fails_and_in_auto_mode(
    notebook: Notebook, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    cell = notebook.run(f"%%dist_profile -o {trace}\ndist.barrier()\nprint('from', __name__)")
    assert cell.text() == "[0-2] from __main__\n"
    [shown] = [data for data in cell.data() if "text/html" in data]
    assert 'class="cellmesh-timeline"' in shown["text/html"]
    assert "A barrier" in shown["text/plain"]
    assert json.loads(trace.read_text())["traceEvents"]
    failed = notebook.run("%%dist_profile\ntorch.ones(1)\nraise ValueError('odd')")
    assert "ranks 0-2 raised ValueError: odd (line 3)" in failed.errors()[-1]["evalue"]
    assert any("text/html" in data for data in failed.data())
    notebook.run("%dist_auto on")
    some = notebook.run("%%dist_profile --ranks 1\ntorch.ones(1)")
    notebook.run("%dist_auto off")
    assert not any("rank 0" in data["text/plain"] for data in some.data())


def test_timeline_and_memory_are_shown_of_the_last_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%%dist\nkept = torch.ones(10_000_000) if rank == 1 else None\ndist.barrier()")
    trace = tmp_path / "trace.json"
    [shown] = notebook.run(f"%dist_timeline --cells 1 -o {trace}").data("execute_result")
    assert 'class="cellmesh-timeline"' in shown["text/html"]
    assert "A barrier" in shown["text/plain"]
    assert f"trace: {trace}" in shown["text/plain"]
    [shown] = notebook.run("%dist_mem").data("execute_result")
    assert "+4" in shown["text/plain"].splitlines()[2]
    assert "<table" in shown["text/html"]
