"""The magics in a real kernel, over the Jupyter protocol, as any front end speaks it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.conftest import check_nothing_left, kernel_config, own_runtime_dir

WAIT_S = 60.0


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
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh").status == "ok"
            assert opened.run("%dist_start 3").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
            check_nothing_left(directory)
        check_nothing_left(directory)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_cell_runs_on_all_ranks_and_is_folded(notebook: Notebook) -> None:
    outcome = notebook.run("%%dist\nprint('hi')\nprint('rank', rank)")
    assert outcome.status == "ok"
    assert outcome.text().splitlines() == ["[0-2] hi", "[0-2] rank 0 … 2"]


def test_ranks_are_chosen_by_number_and_coordinate(notebook: Notebook) -> None:
    assert notebook.run("%%dist --ranks 0,2\nprint(rank)").text() == "[0] 0\n[2] 2\n"
    assert notebook.run("%%dist --at dp=1\nprint(rank)").text() == "[1] 1\n"


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


@pytest.mark.parametrize("owner", ["get_ipython()", "sys.stdout"])
def test_a_thread_that_has_set_its_cell_keeps_the_output_of_its_cells_there(
    notebook: Notebook, owner: str
) -> None:
    first = notebook.send(
        "import sys, threading\ngo = threading.Event()\nparent = get_ipython().get_parent()\n"
        # Before 7, ipykernel has no name of its own for the calling thread's cell.
        f"def work():\n    owner = {owner}\n"
        "    getattr(owner, 'set_thread_parent', sys.stdout.set_parent)(parent)\n    go.wait()\n"
        "    mesh.cell(\"print('from the thread')\")\n"
        "thread = threading.Thread(target=work)\nthread.start()"
    )
    notebook.finish(first)
    later = notebook.run("go.set()\nthread.join()\nmesh.cell(\"print('from the cell')\")")
    assert later.text() == "[0-2] from the cell\n"
    assert notebook.cells[first].text() == "[0-2] from the thread\n"


def test_the_mesh_itself_shows_its_ranks_in_their_places(notebook: Notebook) -> None:
    (data,) = notebook.run("%dist_mesh dp=1 tp=3\nmesh").data("execute_result")
    assert data["text/plain"].startswith("<cellmesh mesh-")
    assert ">tp=2</th>" in data["text/html"]
    assert ">rank 2: idle" in data["text/html"]
    notebook.run("%dist_mesh dp=3")


def test_results_and_rich_displays(notebook: Notebook) -> None:
    assert notebook.run("%%dist\nworld_size").text() == "[0-2] 3\n"
    outcome = notebook.run(
        "%%dist\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))"
    )
    (data,) = outcome.data()
    assert "<b>x</b>" in data["text/html"]
    assert "[0-2]" in data["text/html"]


def test_a_display_is_updated_from_a_later_cell(notebook: Notebook) -> None:
    first = notebook.run(
        "%%dist\nfrom IPython.display import display\nh = display('one', display_id=True)"
    )
    second = notebook.run("%%dist\nh.update('two')")
    ((_, shown),) = [m for m in first.messages if m[0] == "display_data"]
    ((_, updated),) = [m for m in second.messages if m[0] == "update_display_data"]
    assert shown["transient"]["display_id"] == updated["transient"]["display_id"]
    assert "[0-2]" in updated["data"]["text/plain"]
    assert "two" in updated["data"]["text/plain"]


def test_late_output_goes_to_the_cell_that_caused_it(notebook: Notebook) -> None:
    first = notebook.send(
        "%%dist --ranks 1\nimport threading\ngo = threading.Event()\n"
        "t = threading.Thread(target=lambda: (go.wait(), print('late')))\nt.start()"
    )
    notebook.finish(first)
    second = notebook.run("%%dist --ranks 1\nprint('now'); go.set(); t.join()")
    notebook.read_until(first, lambda outcome: "late" in outcome.text())
    assert notebook.cells[first].text() == "[1] late\n"
    assert second.text() == "[1] now\n"


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
    assert re.search(r"\nagent: process \d+ on this machine, alive\n", debug)
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


CAPTURED = """
import contextlib, io
from IPython.utils.capture import capture_output
"""
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
    {
        "a magic": f"%%capture seen\n%%dist{SHOWS}",
        "a block": f"{CAPTURED}\nwith capture_output() as seen:\n"
        f"    get_ipython().run_cell_magic('dist', '', {SHOWS!r})",
        "a call": f"{CAPTURED}\nwith capture_output() as seen:\n    mesh.cell({SHOWS!r})",
        "a line magic, too": f"%%capture seen\nmesh.cell({SHOWS!r})\n%dist_who",
    }.values(),
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
    (shown,) = notebook.run("display(seen.outputs[0])").data()
    assert "<b>rich</b>" in shown["text/html"]
    assert "[0-2]" in shown["text/html"]


def test_only_what_is_redirected_is_captured(notebook: Notebook) -> None:
    outcome = notebook.run(
        f"{CAPTURED}\nwith contextlib.redirect_stdout(io.StringIO()) as seen:\n"
        f"    mesh.cell({SHOWS!r})\nprint(seen.getvalue(), end='')"
    )
    assert outcome.text() == "[0-2] out\n[0-2] last\n"
    assert outcome.text("stderr") == "[0-2] err\n"
    assert "<b>rich</b>" in outcome.data()[0]["text/html"]


def test_bars_and_redrawn_lines_are_captured_as_they_end(notebook: Notebook) -> None:
    redraws = "import tqdm\nfor i in tqdm.trange(3): print(f'\\rstep {i}', end='')\nprint()"
    outcome = notebook.run(f"%%capture seen\n%%dist\n{redraws}")
    assert outcome.messages[2:] == []
    assert notebook.run("print(seen.stdout, end='')").text() == "[0-2] step 2\n"
    assert "3/3" in notebook.run("print(seen.stderr)").text()
    assert notebook.run("len(seen.outputs)").data("execute_result")[0]["text/plain"] == "0"


def test_a_failure_is_shown_around_a_capture_and_what_was_printed_is_kept(
    notebook: Notebook,
) -> None:
    outcome = notebook.run(
        f"{CAPTURED}\nwith capture_output() as seen:\n    mesh.cell('print(1); 1/0')"
    )
    assert outcome.status == "error"
    assert [error["ename"] for error in outcome.errors()] == [
        "[0-2] ZeroDivisionError",
        "RankFailure",
    ]
    assert notebook.run("print(seen.stdout, end='')").text() == "[0-2] 1\n"


def test_late_output_of_a_captured_cell_goes_to_its_cell(notebook: Notebook) -> None:
    first = notebook.send(
        "%%capture seen\n%%dist --ranks 1\nimport threading\ngo = threading.Event()\n"
        "t = threading.Thread(target=lambda: (go.wait(), print('late')))\nt.start()"
    )
    notebook.finish(first)
    assert notebook.run("%%dist --ranks 1\nprint('now'); go.set(); t.join()").text() == "[1] now\n"
    notebook.read_until(first, lambda outcome: "late" in outcome.text())


def test_other_cells_output_is_not_captured(notebook: Notebook) -> None:
    first = notebook.send(
        "%%dist --ranks 1\nimport threading\ngo = threading.Event()\n"
        "t = threading.Thread(target=lambda: (go.wait(), print('its own')))\nt.start()"
    )
    notebook.finish(first)
    notebook.run(
        f"{CAPTURED}\nwith capture_output() as seen:\n    mesh[1].cell('go.set(); t.join()')"
    )
    notebook.read_until(first, lambda outcome: "its own" in outcome.text())
    assert notebook.run("print(repr(seen.stdout))").text() == "''\n"


def test_parts_are_pushed_and_pulled(notebook: Notebook) -> None:
    notebook.run(
        "import torch as th; shard = th.arange(9.).reshape(3, 3)\n%dist_push shard --shard 1"
    )
    assert notebook.run("%%dist\nprint(tuple(shard.shape))").text() == "[0-2] (3, 1)\n"
    notebook.run("%dist_pull shard --gather --dim 1 --as whole")
    assert notebook.run("print(th.equal(whole, shard))").text() == "True\n"
    assert (
        notebook.run("%dist_pull rank+0 --reduce mean").data("execute_result")[0]["text/plain"]
        == "1.0"
    )


def test_auto_mode_sends_cells_to_the_ranks(notebook: Notebook) -> None:
    notebook.run("%dist_auto on")
    try:
        assert notebook.run("print('on', world_size)").text() == "[0-2] on 3\n"
        assert notebook.run("%%local\nprint('here')").text() == "here\n"
        assert notebook.run("%dist_pull rank --as mine").status == "ok"
        mixed = notebook.run("x = 1\n%dist_status")
        assert "cell of its own" in mixed.errors()[0]["evalue"]
    finally:
        notebook.run("%dist_auto off")
    assert notebook.run("print('off')").text() == "off\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%%dist --rnks 1\npass", "Did you mean --ranks"),
        ("%%dist --ranks 9\npass", "no rank 9: the mesh has 3, 0-2"),
        ("%%dist --ranks x\npass", "is no set of ranks"),
        ("%%dist --at pp=0\npass", "no dim 'pp'"),
        ("%%dist --at dp=7\npass", "dim 'dp' has 3 indices"),
        ("%dist_start 2", "runs with 3 ranks, not 2"),
        ("%dist_start eight", "'eight' is not a valid int"),
        ("%dist_mesh dp=2", "makes 2 ranks, and the mesh has 3"),
        ("%dist_push alhpa", "did you mean 'alpha'"),
        ("%dist_pull no_such", "NameError"),
        ("%dist_pull x --rank 9", "no rank 9"),
        ("%dist_pull x --gather --all", "--gather and --reduce take all ranks"),
        ("y = 3\n%dist_push y --shard 0", "y is a int: only tensors"),
        ("%dist_logs 8", "no rank 8"),
        ("%dist_auto maybe", "maybe"),
        ("%dist print(1)", "%%dist"),
    ],
)
def test_wrong_calls_name_the_right_one(notebook: Notebook, code: str, words: str) -> None:
    outcome = notebook.run(code)
    assert outcome.status == "error"
    evalue = outcome.errors()[-1]["evalue"]
    # Not every version of click has the quotes.
    assert words in evalue or words in evalue.replace("'", "")
    assert len(outcome.errors()[-1]["traceback"]) == 1


def test_names_of_the_notebook_are_not_overwritten(notebook: Notebook) -> None:
    names = notebook.run(
        "print(sorted(n for n in globals() if n in "
        "('rank', 'world_size', 'dist', 'torch', 'device', 'local_rank', 'mesh')))"
    )
    assert names.text() == "['mesh']\n"


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


def test_a_flood_leaves_the_kernel_responsive(notebook: Notebook) -> None:
    cell = notebook.send("%%dist --nowait\nfor i in range(300_000): print(rank, i)")
    notebook.finish(cell)
    for number in range(20):
        assert notebook.run(f"print({number})").text() == f"{number}\n"
    outcome = notebook.read_until(
        cell, lambda o: all(f"[{r}] {r} 299999" in o.text() for r in range(3))
    )
    assert len(outcome.text()) < 3_000_000
    assert "not shown" in outcome.text()
    logs = notebook.run("%dist_logs 1 --lines 2").text()
    assert "1 299998\n1 299999" in logs


@pytest.mark.parametrize("restart", [False, True])
def test_without_a_lease_nothing_is_left_when_the_kernel_goes(
    restart: bool, runtime_dir: Path
) -> None:
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh")
        assert opened.run("%dist_start 2 --lease 0").status == "ok"
        if restart:
            opened.client.stop_channels()
            opened.manager.restart_kernel(now=True)
            check_nothing_left(runtime_dir)
            opened.client = opened.manager.blocking_client()
            opened.client.start_channels()
            opened.client.wait_for_ready(timeout=WAIT_S)
    check_nothing_left(runtime_dir)


def test_without_a_mesh_the_magics_say_how_to_start_one(runtime_dir: Path) -> None:
    with open_notebook() as opened:
        opened.run("%load_ext cellmesh")
        for code in ("%%dist\npass", "%dist_status", "%dist_stop", "%dist_pull x"):
            outcome = opened.run(code)
            assert outcome.status == "error"
            assert (
                "no mesh is running: start one with `%dist_start 4`"
                in outcome.errors()[0]["evalue"]
            )
