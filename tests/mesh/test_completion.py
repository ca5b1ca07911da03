"""Tab and help over the Jupyter protocol, and in a terminal: names that live on the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import clean_runtime_dir, stop_process

from .test_kernel import WAIT_S, Notebook, open_notebook, plain

CELL = """%%dist
from torch import nn

class Net(nn.Module):
    "a net of two layers"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])

def double_it(value, times=2):
    "as many times as one likes"
    return value * times

net_of_ranks = Net()
weights_of_ranks = net_of_ranks.state_dict()
if rank == 2:
    only_on_two = 1
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with clean_runtime_dir(), open_notebook() as opened:
        assert opened.run("%load_ext cellmesh\n%dist_start 3").status == "ok"
        # A loaded machine takes its time, and what is tested here is not how long.
        opened.run(
            "from cellmesh.magics import completion\ncompletion._WAIT_S = completion._HELP_S = 30"
        )
        opened.run("get_ipython().Completer.use_jedi = False\nname_in_notebook = [1]")
        assert opened.run(CELL).status == "ok"
        yield opened
        assert opened.run("%dist_stop").status == "ok"


@dataclass(frozen=True)
class Completed:
    """An answer to a request for completions."""

    matches: list[str]
    replaced: str
    types: dict[str, str]


def reply_to(notebook: Notebook, request: str) -> dict[str, Any]:
    reply = notebook.client.get_shell_msg(timeout=WAIT_S)
    while reply["parent_header"].get("msg_id") != request:
        reply = notebook.client.get_shell_msg(timeout=WAIT_S)
    content: dict[str, Any] = reply["content"]
    assert content["status"] == "ok"
    return content


def complete(notebook: Notebook, code: str, cursor: int | None = None) -> Completed:
    content = reply_to(notebook, notebook.client.complete(code, cursor))
    details = content["metadata"].get("_jupyter_types_experimental", [])
    return Completed(
        content["matches"],
        code[content["cursor_start"] : content["cursor_end"]],
        {detail["text"]: detail["type"] for detail in details},
    )


def inspect(notebook: Notebook, code: str, cursor: int, detail: int = 0) -> str:
    content = reply_to(notebook, notebook.client.inspect(code, cursor, detail))
    return plain(content["data"]["text/plain"]) if content["found"] else ""


def pager(notebook: Notebook, code: str) -> str:
    """What a cell shows in the pager."""
    cell = notebook.client.execute(code)
    return "".join(
        plain(each["data"]["text/plain"]) for each in reply_to(notebook, cell)["payload"]
    )


# What is typed, with the cursor, what is offered, and what of the text that replaces.
COMPLETED: list[tuple[str, list[str], str]] = [
    ("%%dist --ranks 1-2\nprint(net_of_ranks.layers[1].wei|)", ["weight"], "wei"),
    ("%%dist_profile --rows 3\nweights_of_ranks['layers.1.|", ["bias", "weight"], "layers.1."),
    ("%%dist\ngröße = '🙂'\nnet_of_ranks.lay| = 1", ["layers"], "lay"),
    # The chosen ranks are asked; if a line of options is not whole yet, the lowest one.
    ("%%dist --at dp=2\nonly_on|", ["only_on_two"], "only_on"),
    ("%%dist --ranks 0-1\nonly_on|", [], ""),
    ("%%dist --ranks\nnet_of|", ["net_of_ranks"], "net_of"),
    ("%%time\n%%dist --ranks 2\nonly_on|", ["only_on_two"], "only_on"),
    # Plain cells, and what ranks do not know, are the notebook's.
    ("net_of|", [], ""),
    ("%%local\nname_in|", ["name_in_notebook"], "name_in"),
    ("%%dist\nname_in_notebook.app|", ["append"], ".app"),
    ("%%dist --no-such-option\nname_in|", ["name_in_notebook"], "name_in"),
    # Options and names of magics.
    ("x = 1\n%dist_start --backend n|", ["nccl"], "n"),
    ("%dist_pull net_of_ranks.layers[0].we|", ["weight"], "we"),
    ("%dist_push name_i|", ["name_in_notebook"], "name_i"),
]


def test_completions(notebook: Notebook) -> None:
    for typed, matches, replaced in COMPLETED:
        found = complete(notebook, typed.replace("|", ""), typed.index("|"))
        assert [text.rpartition(".")[2] for text in found.matches] == matches, typed
        assert found.replaced == replaced or not matches
    assert complete(notebook, "%%dist\nnet_of").types == {"net_of_ranks": "variable"}
    assert {"ones", "nn", "zeros_like"} <= set(complete(notebook, "%%dist\ntorch.").matches)
    assert "%time" in complete(notebook, "%%dist\n%tim").matches
    assert "/tmp/" in complete(notebook, "%%dist\nopen('/tm").matches


def test_auto_mode(notebook: Notebook) -> None:
    notebook.run("%dist_auto on")
    try:
        assert complete(notebook, "net_of").matches == ["net_of_ranks"]
        assert complete(notebook, "%%local\nname_in").matches == ["name_in_notebook"]
        assert "as many times as one likes" in pager(notebook, "double_it?")
        assert "return value * times" in pager(notebook, "??double_it")
    finally:
        notebook.run("%dist_auto off")
    assert complete(notebook, "net_of").matches == []


def test_help_shows_docstring_and_source(notebook: Notebook) -> None:
    code = "%%dist\nx = double_it(3)"
    assert "Signature: double_it(value, times=2)" in inspect(notebook, code, code.index("it(3"))
    inside = len(code) - 1
    assert "as many times as one likes" in inspect(notebook, code, inside)
    indexed = "%%dist\nnet_of_ranks.layers[0].in_features"
    assert "String form: 2" in inspect(notebook, indexed, len(indexed) - 3)
    source = pager(notebook, "%%dist --ranks 1\ndouble_it??")
    assert "def double_it(value, times=2):" in source
    assert "    return value * times" in source
    assert "a net of two layers" in pager(notebook, "%%dist\n??Net")
    assert "list" in pager(notebook, "%%dist\nname_in_notebook?")  # the notebook's own


def test_a_rank_that_does_not_answer_is_not_waited_for(notebook: Notebook) -> None:
    ran = notebook.run(
        "[stopped] = [info.pid for info in mesh.report() if info.rank == 1]\n"
        "completion._WAIT_S = 0.15\n"
        "print(stopped)"
    )
    stopped = int(ran.text())
    stop_process(stopped)
    try:
        assert complete(notebook, "%%dist --ranks 1\nname_in").matches == ["name_in_notebook"]
    finally:
        os.kill(stopped, signal.SIGCONT)
        notebook.run("completion._WAIT_S = 30")
    assert complete(notebook, "%%dist --ranks 1\nnet_of").matches == ["net_of_ranks"]


TERMINAL = """
import warnings
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.terminal.ptutils import IPythonPTCompleter
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
import cellmesh.magics.completion

cellmesh.magics.completion._WAIT_S = 30
shell = TerminalInteractiveShell.instance()
shell.Completer.use_jedi = False
shell.run_cell("%load_ext cellmesh")
shell.run_cell("%dist_start 1")
shell.run_cell("%%dist\\nname_on_ranks = 'x'\\ndef f():\\n    'does much'")
completer = IPythonPTCompleter(shell=shell)
for code in ("%%dist\\nname_on_ranks.upp", "%%dist --ra", "%dist_pull name_"):
    found = completer.get_completions(Document(code), CompleteEvent())
    print([(each.text, each.start_position) for each in found])
shell.run_cell("%%dist\\nf?")
shell.run_cell("%dist_stop")
shell.run_cell("%unload_ext cellmesh")
print(sorted({"completions", "do_inspect"} & {*vars(shell.Completer)}))
print(shell.Completer.custom_matchers, shell.Completer.disable_matchers)
"""


def test_terminal_ipython_completes_and_unloading_restores_its_completer() -> None:
    with clean_runtime_dir():
        command = [sys.executable, "-c", TERMINAL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    for found in ("[('upper', -3)]", "[('--ranks', -4)]", "[('name_on_ranks', -5)]"):
        assert found in done.stdout
    assert "does much" in plain(done.stdout)
    assert done.stdout.endswith("[]\n[] []\n")
