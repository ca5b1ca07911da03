"""ipywidgets made on ranks, over the Jupyter protocol: what a front end is told, and what it can
say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import cellmesh as cm
from tests.conftest import check_nothing_left, kernel_config, own_runtime_dir

from .test_kernel import WAIT_S, Notebook, Outcome, plain

VIEW = "application/vnd.jupyter.widget-view+json"
BEGIN = "import ipywidgets as w\nfrom IPython.display import display\n"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel with a mesh of three, which logs no exception."""
    log = tmp_path_factory.mktemp("kernel") / "log"
    with own_runtime_dir() as directory:
        manager = KernelManager(kernel_name="python3", config=kernel_config())
        with log.open("w") as file:
            manager.start_kernel(stderr=file)
        try:
            opened = Notebook(manager)
            assert opened.run("%load_ext cellmesh\n%dist_start 3").status == "ok"
            yield opened
            assert opened.run("%dist_stop").status == "ok"
            opened.client.stop_channels()
        finally:
            manager.shutdown_kernel(now=False)
            manager.cleanup_resources()
        check_nothing_left(directory)
    assert "Traceback" not in log.read_text()


class Front:
    """A front end's part: what it knows of the widgets of one cell.

    Args:
        notebook: the kernel.
        cell: the cell that makes them.
    """

    def __init__(self, notebook: Notebook, source: str) -> None:
        self.notebook = notebook
        self.cell = notebook.send(source)
        self.outcome = notebook.finish(self.cell)
        assert self.outcome.status == "ok", self.outcome.errors()

    @property
    def views(self) -> list[str]:
        """The models that are displayed."""
        return [data[VIEW]["model_id"] for data in self.outcome.data() if VIEW in data]

    def models(self, name: str) -> list[str]:
        """The models of a class."""
        opened = [c for kind, c in self.outcome.messages if kind == "comm_open"]
        return [c["comm_id"] for c in opened if c["data"]["state"]["_model_name"] == name]

    def state(self, model: str) -> dict[str, Any]:
        """A model's, as far as the front end was told."""
        state: dict[str, Any] = {}
        for kind, content in self.outcome.messages:
            if kind in ("comm_open", "comm_msg") and content["comm_id"] == model:
                state.update(content["data"].get("state", {}))
        return state

    def say(self, model: str, data: dict[str, Any], buffers: list[bytes] | None = None) -> Outcome:
        """Say something to a comm; gives what was answered by the time the kernel was idle
        again.
        """
        session = self.notebook.client.session
        message = session.msg("comm_msg", {"comm_id": model, "data": data})
        identity = message["header"]["msg_id"]
        self.notebook.cells[identity] = Outcome()
        session.send(self.notebook.client.shell_channel.socket, message, buffers=buffers)
        return self.notebook.read_until(identity, lambda outcome: outcome.status == "idle")

    def set(self, model: str, **state: Any) -> Outcome:
        """Change a model's state."""
        return self.say(model, {"method": "update", "state": state, "buffer_paths": []})

    def click(self, model: str) -> None:
        """Press a button."""
        self.say(model, {"method": "custom", "content": {"event": "click"}})

    def wait_until(self, done: Callable[[], Any]) -> None:
        """Read messages of the cell until this is so."""
        self.notebook.read_until(self.cell, lambda outcome: done())

    def wait_for_text(self, part: str, name: str = "stdout") -> None:
        """Until the cell's output has this."""
        self.wait_until(lambda: part in plain(self.outcome.text(name)))


def test_the_lowest_ranks_slider_is_shown_and_answers(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}s = w.IntSlider()\ns.observe(lambda c: print('now', c['new']), "
        "'value')\ndisplay(s)",
    )
    (slider,) = front.views
    assert front.models("IntSliderModel") == [slider], "other ranks' are not known to the front end"
    texts = [data["text/plain"] for data in front.outcome.data()]
    assert texts == [
        "[0] (ranks 1-2 have one, too: `%%dist --ranks 1` shows rank 1's)",
        "IntSlider(value=0)",
    ]
    echo = front.set(slider, value=7)
    (told,) = [c["data"] for kind, c in echo.messages if kind == "comm_msg"]
    assert told == {"method": "echo_update", "state": {"value": 7}, "buffer_paths": []}
    front.wait_for_text("[0] now 7\n")
    assert notebook.run("%%dist\nprint(s.value)").text() == "[0] 7\n[1-2] 0\n"


def test_change_of_a_widget_on_a_rank_reaches_the_front_end(notebook: Notebook) -> None:
    front = Front(notebook, f"%%dist\n{BEGIN}s = w.FloatProgress(max=1e5)\ns")
    (bar,) = front.views
    assert notebook.run("%%dist\nfor i in range(20_000):\n    s.value = i + 1").status == "ok"
    front.wait_until(lambda: front.state(bar)["value"] == 20_000)
    updates = [
        c for kind, c in front.outcome.messages if kind == "comm_msg" and c["comm_id"] == bar
    ]
    assert len(updates) < 2_000, "a loop makes few messages"


def test_another_ranks_widget_is_shown_once_it_leads(notebook: Notebook) -> None:
    Front(
        notebook,
        f"%%dist\n{BEGIN}child = w.IntText(rank)\nbox = w.VBox()\nlate = w.Label('x')\n"
        "box.children = (child, late)\nhidden = display(box)",
    )
    front = Front(notebook, "%%dist --ranks 2\nchild.value += 40\ndisplay(box)")
    (box,) = front.views
    (child,) = front.models("IntTextModel")
    assert front.state(child)["value"] == 42
    opened = [c["comm_id"] for kind, c in front.outcome.messages if kind == "comm_open"]
    for model in front.state(box)["children"]:
        assert opened.index(model.removeprefix("IPY_MODEL_")) < opened.index(box), (
            "what it refers to is first"
        )
    front.set(child, value=5)
    assert notebook.run("%%dist\nprint(child.value)").text() == "[0] 0\n[1] 1\n[2] 5\n"


def test_a_widget_that_refers_to_a_quiet_one_opens_it_first(notebook: Notebook) -> None:
    Front(notebook, f"%%dist\n{BEGIN}first, second = w.IntText(rank), w.IntText(10 * rank)")
    front = Front(
        notebook, "%%dist --ranks 1\nbox = w.VBox([first])\ndisplay(box)\nbox.children = [second]"
    )
    (box,) = front.views
    front.wait_until(lambda: len(front.models("IntTextModel")) == 2)
    ids = [content.get("comm_id") for _, content in front.outcome.messages]
    first, second = front.models("IntTextModel")
    assert ids.index(first) < ids.index(box) < ids.index(second)
    assert (front.state(first)["value"], front.state(second)["value"]) == (1, 10)
    front.wait_until(lambda: front.state(box)["children"] == [f"IPY_MODEL_{second}"])


def test_a_widget_that_only_a_higher_rank_displays_is_named(notebook: Notebook) -> None:
    front = Front(notebook, f"%%dist\n{BEGIN}if rank == 1:\n    display(w.IntSlider())")
    assert front.views == []
    (data,) = front.outcome.data()
    assert data["text/plain"] == "[1] IntSlider (not shown; `%%dist --ranks 1` shows rank 1's)"


def test_interact(notebook: Notebook) -> None:
    front = Front(
        notebook, f"%%dist\n{BEGIN}w.interact(lambda x: print('x is', x) or [x], x=(0, 10));"
    )
    (output,) = front.models("OutputModel")
    (slider,) = front.models("IntSliderModel")
    assert front.outcome.text() == "", "what the function prints stands in its widget"

    def printed() -> str:
        return "".join(output.get("text", "") for output in front.state(output)["outputs"])

    front.wait_until(lambda: printed() == "x is 5\n")
    front.set(slider, value=8)
    front.wait_until(lambda: printed() == "x is 8\n" and len(front.state(output)["outputs"]) == 2)
    assert front.state(output)["outputs"][1]["data"]["text/plain"] == "[8]"


def test_output_widgets_take_text_displays_and_errors(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist --ranks 1\n{BEGIN}out = w.Output()\ndisplay(out)\nprint('before')\n"
        "with out:\n    print('inside')\n    display({'a': 1})\n    1 / 0\nprint('after')",
    )
    (output,) = front.views
    assert front.outcome.text() == "[1] before\n[1] after\n"
    front.wait_until(lambda: len(front.state(output)["outputs"]) == 3)
    text, shown, error = front.state(output)["outputs"]
    assert text == {"output_type": "stream", "name": "stdout", "text": "inside\n"}
    assert shown["data"] == {"text/plain": "{'a': 1}"}
    assert "ZeroDivisionError: division by zero" in plain(error["text"])


def test_a_button_and_an_error_in_its_callback(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}b = w.Button()\ncount = 0\n"
        "def pressed(button):\n    global count\n    count += 1\n    print('pressed', count)\n"
        "    if count == 2:\n        raise ValueError('twice')\n"
        "b.on_click(pressed)\ndisplay(b)",
    )
    (button,) = front.views
    for _ in range(3):
        front.click(button)
    front.wait_for_text("[0] pressed 3\n")
    front.wait_for_text("ValueError: twice", "stderr")
    assert re.search(r"\[0\] .*Traceback|\[0\] -----", plain(front.outcome.text("stderr")))
    # It costs nothing: the groups are as they were.
    reduced = notebook.run("%%dist\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(count, t.item())")
    assert reduced.text() == "[0] 3 3.0\n[1-2] 0 3.0\n"


def test_buffers_both_ways(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}image = w.Image(value=b'\\x00\\x01' * 4)\nupload = w.FileUpload()\n"
        "image.on_msg(lambda widget, content, buffers: widget.send({'n': len(buffers[0])}, "
        "[bytes(buffers[0])[::-1]]))\ndisplay(image)",
    )
    (image,) = front.views
    (opened,) = [
        c for kind, c in front.outcome.messages if kind == "comm_open" and c["comm_id"] == image
    ]
    assert opened["data"]["buffer_paths"] == [["value"]]
    big = bytes(range(256)) * (4 << 12)  # 4 MB
    front.say(image, {"method": "custom", "content": {}}, [big])
    found: list[Any] = []
    while not found:
        message = notebook.client.get_iopub_msg(timeout=WAIT_S)
        if (
            message["msg_type"] == "comm_msg"
            and message["content"]["data"].get("method") == "custom"
        ):
            found.append(message)
    assert found[0]["content"]["data"]["content"] == {"n": len(big)}
    assert bytes(found[0]["buffers"][0]) == big[::-1]


def test_moves_while_a_rank_is_busy_arrive_in_order(notebook: Notebook, tmp_path: Path) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}import os, time\nseen = []\ns = w.IntSlider(max=10**6)\n"
        "s.observe(lambda c: seen.append(c['new']), 'value')\ndisplay(s)",
    )
    (slider,) = front.views
    gate = tmp_path / "gate"
    waiting = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    assert (
        notebook.run(f"%%dist --nowait --ranks 0\ns.description = 'busy'\n{waiting}").status == "ok"
    )
    front.wait_until(lambda: front.state(slider)["description"] == "busy")
    for value in (3, 1, 2):
        echo = front.set(slider, value=value)
        assert "comm_msg" in [kind for kind, _ in echo.messages], "the kernel confirms it"
    data, _ = load_page_again(notebook)
    assert data["states"][slider]["state"]["description"] == "busy", "the busy rank has answered"
    gate.touch()
    assert notebook.run("%%dist --ranks 0\nprint(seen)").text() == "[0] [3, 1, 2]\n"


def load_page_again(notebook: Notebook) -> tuple[dict[str, Any], list[Any]]:
    """Ask for all widgets as a page does; gives the answer and its buffers."""
    client, session = notebook.client, notebook.client.session
    opening = session.msg(
        "comm_open",
        {"comm_id": "asking", "target_name": "jupyter.widget.control", "data": {}},
        metadata={"version": "1.0.0"},
    )
    session.send(client.shell_channel.socket, opening)
    asked = session.msg("comm_msg", {"comm_id": "asking", "data": {"method": "request_states"}})
    session.send(client.shell_channel.socket, asked)
    message = client.get_iopub_msg(timeout=WAIT_S)
    while message["content"].get("data", {}).get("method") != "update_states":
        message = client.get_iopub_msg(timeout=WAIT_S)
    return message["content"]["data"], message["buffers"]


def test_reloaded_page_gets_the_widgets_of_ranks(notebook: Notebook) -> None:
    notebook.run("import ipywidgets\nown = ipywidgets.IntText(3)")
    front = Front(
        notebook, f"%%dist\n{BEGIN}s = w.IntSlider()\nimage = w.Image(value=b'png')\ndisplay(s)"
    )
    (slider,) = front.views
    (image,) = front.models("ImageModel")
    front.set(slider, value=9)
    notebook.run("%%dist\ns.description = 'from the rank'")
    front.wait_until(lambda: front.state(slider)["description"] == "from the rank")
    client = notebook.client
    own = notebook.run("print(own.model_id)").text().strip()
    known = client.comm_info(reply=True, timeout=WAIT_S)["content"]["comms"]
    assert known[slider] == {"target_name": "jupyter.widget"}

    data, buffers = load_page_again(notebook)
    state = data["states"][slider]
    assert (state["model_name"], state["state"]["value"]) == ("IntSliderModel", 9)
    assert state["state"]["description"] == "from the rank"
    assert data["states"][own]["state"]["value"] == 3, "the kernel's own"
    index = data["buffer_paths"].index([image, "state", "value"])
    assert bytes(buffers[index]) == b"png"

    answer = front.say(slider, {"method": "request_state"})
    (told,) = [c["data"] for kind, c in answer.messages if kind == "comm_msg"]
    assert (told["method"], told["state"]["value"]) == ("update", 9)


def test_a_widget_that_is_closed_on_its_rank_is_closed_here(notebook: Notebook) -> None:
    front = Front(notebook, f"%%dist\n{BEGIN}s = w.IntSlider()\ndisplay(s)")
    (slider,) = front.views
    assert notebook.run("%%dist\ns.close()").status == "ok"
    front.wait_until(
        lambda: any(k == "comm_close" and c["comm_id"] == slider for k, c in front.outcome.messages)
    )
    front.set(slider, value=1)  # too late: nobody minds
    assert notebook.run("%%dist\n1 + 1").text() == "[0-2] 2\n"


def test_a_callback_is_interrupted(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}import time\nb = w.Button()\n"
        "def pressed(button):\n    print('begins')\n    time.sleep(600)\n"
        "b.on_click(pressed)\ndisplay(b)",
    )
    (button,) = front.views
    front.click(button)
    front.wait_for_text("[0] begins\n")
    notebook.run("%dist_interrupt")
    front.wait_until(
        lambda: any("KeyboardInterrupt" in error["ename"] for error in front.outcome.errors())
    )
    assert front.outcome.errors()[0]["ename"] == "[0] KeyboardInterrupt"
    assert (
        notebook.run("%%dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").text()
        == "[0-2] 3.0\n"
    )


def test_the_stop_button_ends_the_callback_that_a_cell_waits_for(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}import time\nb = w.Button()\n"
        "def pressed(button):\n    print('begins')\n    time.sleep(600)\n"
        "b.on_click(pressed)\ndisplay(b)",
    )
    (button,) = front.views
    front.click(button)
    front.wait_for_text("[0] begins\n")
    waiting = notebook.send("%%dist\nprint('the others')")
    notebook.read_until(waiting, lambda outcome: "[1-2] the others\n" in outcome.text())
    notebook.manager.interrupt_kernel()
    assert notebook.finish(waiting).status == "error"
    front.wait_until(lambda: front.outcome.errors())
    assert front.outcome.errors()[0]["ename"] == "[0] KeyboardInterrupt"
    assert notebook.run("%%dist\n1 + 1").text() == "[0-2] 2\n"


def test_a_callback_that_waits_for_other_ranks_is_released(notebook: Notebook) -> None:
    front = Front(
        notebook,
        f"%%dist\n{BEGIN}b = w.Button()\nb.on_click(lambda button: dist.barrier())\ndisplay(b)",
    )
    (button,) = front.views
    front.click(button)
    front.wait_until(lambda: front.outcome.errors())
    assert front.outcome.errors()[0]["ename"] == "[0] Released"
    assert (
        notebook.run("%%dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").text()
        == "[0-2] 3.0\n"
    )


def test_anywidgets_and_plotly(notebook: Notebook) -> None:
    front = Front(
        notebook,
        "%%dist\nimport plotly.graph_objects as go\nf = go.FigureWidget(go.Scatter(y=[1, 2, "
        "3]))\nf",
    )
    (figure,) = front.views
    assert front.state(figure)["_model_module"] == "anywidget"
    assert notebook.run("%%dist\nf.data[0].y = [4, 5, 6]").status == "ok"
    front.wait_until(
        lambda: any(
            kind == "comm_msg"
            and c["comm_id"] == figure
            and c["data"].get("state", {}).get("_py2js_restyle")
            for kind, c in front.outcome.messages
        )
    )


def test_a_rank_that_dies_leaves_its_widgets_as_they_look(notebook: Notebook) -> None:
    front = Front(notebook, f"%%dist\n{BEGIN}s = w.IntSlider(3)\ndisplay(s)")
    (slider,) = front.views
    assert (
        notebook.run("%%dist\nimport os\nif rank == 0:\n    os.kill(os.getpid(), 9)").status
        == "error"
    )
    front.wait_for_text("rank 0 was killed by SIGKILL", "stderr")
    front.wait_for_text("its widgets stay as they look", "stderr")
    kinds = [kind for kind, content in front.outcome.messages if content.get("comm_id") == slider]
    assert "comm_close" not in kinds, "it stands there, with its last state"
    assert slider not in notebook.client.comm_info(reply=True, timeout=WAIT_S)["content"]["comms"]
    front.set(slider, value=1)  # a page that has not heard of it
    assert notebook.run("%dist_heal").status == "ok"
    again = Front(notebook, f"%%dist\n{BEGIN}s = w.IntSlider(4)\ndisplay(s)")
    again.set(again.views[0], value=6)
    assert notebook.run("%%dist --ranks 0\ns.value").text() == "[0] 6\n"


def test_restart_ends_widgets_of_ranks(notebook: Notebook) -> None:
    front = Front(notebook, f"%%dist\n{BEGIN}s = w.IntSlider()\ndisplay(s)")
    assert notebook.run("%dist_restart").status == "ok"
    front.wait_for_text("the mesh was restarted: its ranks' widgets stay as they look", "stderr")
    assert notebook.run(
        "%%dist\nimport sys\n'ipywidgets' in sys.modules or 'comm' in sys.modules"
    ).text() == ("[0-2] False\n"), "nothing of this is there before user code imports it"


def test_widgets_can_be_shown_again_after_a_detach(notebook: Notebook) -> None:
    before = Front(notebook, f"%%dist\n{BEGIN}s = w.IntSlider()\ndisplay(s)")
    (slider,) = before.views
    name = notebook.run("print(mesh.name)").text().strip()
    assert notebook.run("%dist_detach").status == "ok"
    before.wait_for_text("this notebook has left it", "stderr")
    assert notebook.run(f"%dist_attach {name}").status == "ok"
    notebook.run("%%dist\ns.value = 2")
    front = Front(notebook, "%%dist\ndisplay(s)")
    assert front.views == [slider]
    assert front.state(slider)["value"] == 2
    front.set(slider, value=3)
    assert notebook.run("%%dist --ranks 0\ns.value").text() == "[0] 3\n"


def test_a_comm_without_widgets(notebook: Notebook) -> None:
    front = Front(
        notebook,
        "%%dist\nimport comm\nc = comm.create_comm('mine', data={'a': 1}, metadata={'m': 2})\n"
        "c.on_msg(lambda message: c.send({'back': message['content']['data']}))",
    )
    (opened,) = [content for kind, content in front.outcome.messages if kind == "comm_open"]
    assert (opened["target_name"], opened["data"]) == ("mine", {"a": 1})
    front.say(opened["comm_id"], {"x": [1]})
    front.wait_until(
        lambda: any(
            k == "comm_msg" and c["data"] == {"back": {"x": [1]}} for k, c in front.outcome.messages
        )
    )


def test_a_widget_of_the_notebooks_own_runs_all_ranks(notebook: Notebook) -> None:
    front = Front(
        notebook,
        "import ipywidgets\ndef total(x):\n    mesh.cell(f't = torch.tensor({x} + rank); "
        "dist.all_reduce(t); print(t.item())')\nipywidgets.interact(total, x=(0, 10));",
    )
    assert front.outcome.text() == "[0-2] 18\n"
    (slider,) = front.models("IntSliderModel")
    moved = front.set(slider, value=7)
    assert moved.text() == "[0-2] 24\n", (
        "as an answer to the move, which is where `Output` picks it up"
    )


def test_comms_are_the_ranks_own_whatever_is_imported(runtime_dir: Path) -> None:
    with cm.start(1, preload=["ipywidgets"]) as mesh:
        mesh.cell(
            "import comm, ipykernel.ipkernel, ipywidgets\nkinds = [type(made).__name__ for made "
            "in (comm.create_comm('x'), ipywidgets.Label().comm)]"
        )
        assert mesh[0].pull("kinds") == ["RankComm", "RankComm"]
    check_nothing_left(runtime_dir)


def test_the_number_of_widgets_is_bounded(notebook: Notebook, tmp_path: Path) -> None:
    lines = (
        "from cellmesh.controller import comms",
        "limit, comms.MAX_OPEN = comms.MAX_OPEN, 300",
    )
    notebook.run("\n".join(lines))
    front = Front(
        notebook, f"%%dist --ranks 0\n{BEGIN}many = [w.Label(str(i)) for i in range(1000)]\n"
    )
    front.wait_until(lambda: "more than 300 widgets" in front.outcome.text("stderr"))
    assert len([kind for kind, _ in front.outcome.messages if kind == "comm_open"]) <= 300
    notebook.run("comms.MAX_OPEN = limit")


SIZE = 1 << 20


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        ("x = w.HTML()", f"x.value = str(i % 10) * {SIZE}", "HTML"),
        ("x = w.Image(value=b'')", f"x.value = bytes([i]) * {SIZE}", "Image"),
        ("x = w.Output()", f"with x: i or display('a' * 40 * {SIZE})", "Output"),
        ("x = w.Box()", f"x.children = [w.HTML('a' * {SIZE})]", "HTML"),
        ("x = w.Label('')", f"x.send('a' * {SIZE})", "Label"),
        (
            "import comm; x = comm.create_comm('mine')",
            f"x.send({{}}, buffers=[bytes({SIZE})])",
            "the comm 'mine'",
        ),
    ],
)
def test_messages_of_widgets_are_bounded_by_bytes(
    notebook: Notebook, make: str, change: str, name: str
) -> None:
    assert notebook.run("%dist_restart").status == "ok"
    sizes: list[int] = []
    get = notebook.client.get_iopub_msg

    def count(**keys: Any) -> Any:
        message = get(**keys)
        sizes.append(len(str(message["content"])) + sum(map(len, message.get("buffers", ()))))
        return message

    notebook.client.get_iopub_msg = count
    try:
        front = Front(
            notebook,
            f"%%dist --ranks 0\n{BEGIN}{make}\nif hasattr(x, 'layout'): display(x)\n"
            f"import time\nfor i in range(100):\n    {change}\n    time.sleep(0.04)",
        )
        said = re.findall(
            r"cellmesh: a message of [\d,]+ bytes of (.*) was not sent: ",
            front.outcome.text("stderr"),
        )
        assert len(said) == 1, front.outcome.text("stderr")
        assert re.fullmatch(name, said[0])
        assert sum(sizes) < 90 << 20
    finally:
        notebook.client.get_iopub_msg = get
    if "HTML()" in make or "Image" in make:
        (model,) = front.views
        assert notebook.run("%%dist --ranks 0\ntime.sleep(1)").status == "ok"
        front.wait_until(lambda: front.state(model).get("value", "9")[:1] in ("9", b";"[:1]))


def test_a_widget_that_is_too_large_is_text_and_lives_on(notebook: Notebook) -> None:
    assert notebook.run("%dist_restart").status == "ok"
    front = Front(
        notebook,
        f"%%dist --ranks 0\n{BEGIN}x = w.Image(value=bytes(50 << 20))\nbox = "
        "w.VBox([x])\ndisplay(x, box)",
    )
    assert front.views == []
    shown = [data["text/plain"] for data in front.outcome.data()]
    assert any("Image(value=b" in text for text in shown), shown
    assert any("VBox(children=(Image" in text for text in shown), shown
    assert re.search(
        "a message of 52,4[0-9,]* bytes of Image was not", front.outcome.text("stderr")
    )
    again = Front(notebook, "%%dist --ranks 0\nx.value = b'small'\ndisplay(box)")
    assert again.models("VBoxModel") == again.views
    assert len(again.models("ImageModel")) == 1
