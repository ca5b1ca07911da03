"""Rich output across ranks, over the Jupyter protocol: every type arrives, labelled, in its latest
state.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.conftest import check_nothing_left, own_runtime_dir

from .test_kernel import Notebook, Outcome, open_notebook

# What VS Code's notebook draws: `mimeTypes` of the renderers in extensions/notebook-renderers and
# extensions/markdown-language-features of microsoft/vscode (package.json), and those of the
# extension ms-toolsai.jupyter-renderers, which comes with its Jupyter extension.
VS_CODE = {
    "image/gif", "image/png", "image/jpeg", "image/svg+xml", "text/html", "application/javascript",
    "text/plain", "text/markdown", "text/latex", "application/vnd.plotly.v1+json",
    "application/vnd.jupyter.widget-view+json",
}  # fmt: skip


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with own_runtime_dir() as directory:
        with open_notebook() as opened:
            assert opened.run("%load_ext cellmesh").status == "ok"
            assert opened.run("%dist_start 3").status == "ok"
            opened.run(
                "%%dist\nfrom IPython.display import *\nimport pandas, matplotlib.pyplot as plt, "
                "PIL.Image"
            )
            yield opened
            assert opened.run("%dist_stop").status == "ok"
        check_nothing_left(directory)


def run(notebook: Notebook, source: str) -> Outcome:
    outcome = notebook.run(f"%%dist\ndist.barrier()\n{source}")
    assert outcome.status == "ok", outcome.errors()
    check_drawable(outcome)
    return outcome


def check_drawable(outcome: Outcome) -> None:
    """VS Code can draw every output, and nbconvert can write it."""
    outputs = []
    for kind, content in outcome.messages:
        if kind in ("display_data", "update_display_data"):
            assert VS_CODE & content["data"].keys(), content["data"].keys()
        if kind == "display_data":
            outputs.append(new_output(kind, data=content["data"], metadata=content["metadata"]))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    saved = new_notebook(cells=[new_code_cell(outputs=outputs)], metadata={"kernelspec": kernel})
    nbformat.validate(saved)
    HTMLExporter(template_name="basic").from_notebook_node(saved)  # type: ignore[no-untyped-call]


def bundles(outcome: Outcome) -> list[dict[str, Any]]:
    """What is displayed, the switch between ranks aside."""
    return [data for data in outcome.data() if "cellmesh-ranks" not in data.get("text/html", "")]


def switches(outcome: Outcome) -> list[str]:
    return [
        data["text/html"]
        for data in outcome.data()
        if "cellmesh-ranks" in data.get("text/html", "")
    ]


def area(outcome: Outcome) -> list[str]:
    """What stands in the output area in the end, as text."""
    shown: list[tuple[str, str]] = []
    clears = False
    for kind, content in outcome.messages:
        if kind == "clear_output":
            clears = content["wait"]
            shown = shown if clears else []
        elif kind in ("stream", "display_data"):
            shown, clears = [] if clears else shown, False
            text = content.get("text") or content["data"].get("text/plain", "")
            shown.append((content.get("transient", {}).get("display_id", ""), text))
        elif kind == "update_display_data":
            ours = content["transient"]["display_id"]
            shown = [(i, content["data"]["text/plain"] if i == ours else text) for i, text in shown]
    return [line for _, text in shown for line in text.splitlines() if line]


def test_equal_tables_are_one(notebook: Notebook) -> None:
    outcome = run(notebook, "pandas.DataFrame({'a': [1, 2]})")
    [data] = bundles(outcome)
    assert "<table" in data["text/html"]
    assert "[0-2]" in data["text/html"]
    assert data["text/plain"].startswith("[0-2] ")
    assert switches(outcome) == []


def test_plots_of_several_ranks(notebook: Notebook) -> None:
    outcome = run(notebook, "plt.figure(figsize=(2, 1)); plt.plot([0, rank]); plt.show()")
    [first] = bundles(outcome)
    assert base64.b64decode(first["image/png"]).startswith(b"\x89PNG")
    *_, row = outcome.data("update_display_data")  # the others stand beside it
    assert [line[:3] for line in row["text/plain"].splitlines()] == ["[0]", "[1]", "[2]"]
    assert row["text/html"].count("<img ") == 3
    [switch] = switches(outcome)
    assert switch.count("<img ") == 3
    assert "<details" in switch


def test_a_plot_that_is_not_shown_is_shown_at_the_cells_end(notebook: Notebook) -> None:
    [data] = bundles(run(notebook, "plt.figure(figsize=(2, 1)); _ = plt.plot([0, 1])"))
    assert data["text/plain"].startswith("[0-2] <Figure")


def test_images_keep_their_size(notebook: Notebook) -> None:
    [data] = bundles(run(notebook, "PIL.Image.new('RGB', (4, 3))"))
    assert "image/png" in data
    [data] = bundles(
        run(
            notebook,
            "import io\nfile = io.BytesIO()\nPIL.Image.new('RGB', (4, 3)).save(file, 'PNG')\n"
            "display(Image(file.getvalue(), width=40))",
        )
    )
    assert 'width="40"' in data["text/html"]


def test_plotly_is_drawn_by_the_front_end_and_sends_no_program(notebook: Notebook) -> None:
    notebook.run(
        "%%dist\nimport plotly.graph_objects as go\nfigure = go.Figure(go.Scatter(y=[0, rank // "
        "2]))\n"
        "figure.show()"  # the first time takes ranks unequally long
    )
    above, first, below, second = bundles(run(notebook, "figure.show()"))
    assert (above["text/plain"], below["text/plain"]) == ("[0-1]", "[2]")
    assert first["application/vnd.plotly.v1+json"]["data"][0]["type"] == "scatter"
    assert second["text/plain"] == "[2] <application/vnd.plotly.v1+json>"
    assert "text/html" not in first
    [_, as_value] = bundles(run(notebook, "figure if rank == 0 else None"))
    assert "application/vnd.plotly.v1+json" in as_value


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("HTML('<i>x</i>')", "text/html"),
        ("SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')", "image/svg+xml"),
        ("Latex('$x^2$')", "text/markdown"),
        ("Math('x^2')", "text/markdown"),
        ("Markdown('*x*')", "text/markdown"),
        ("Audio(b'1234', rate=8000)", "text/html"),
        ("Video(b'1234', embed=True, mimetype='video/mp4')", "text/html"),
        ("IFrame('about:blank', 10, 10)", "text/html"),
        ("Javascript('1 + 1')", "application/javascript"),
        ("JSON({'a': 1})", "application/json"),
        ("GeoJSON({'type': 'Point'})", "application/geo+json"),
    ],
)
def test_every_kind_of_display(notebook: Notebook, source: str, kind: str) -> None:
    outcome = run(notebook, f"display({source})")
    data = bundles(outcome)[-1]
    assert kind in data
    assert "[0-2]" in json.dumps(bundles(outcome))
    assert switches(outcome) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("w.IntSlider(value=2)", "[0-2]\nIntSlider(value=2)\n"),
        ("display(w.IntSlider(value=2))", "[0-2] IntSlider(value=2)\n"),
        ("w.interact(lambda p: print('power', p), p=(1, 4));", "[0-2] power 2\n"),
        ("o = w.Output()\nwith o: print('within')\no", "[0-2] within\n"),
    ],
    ids=["value", "display", "interact", "output"],
)
def test_a_widget_is_its_text(notebook: Notebook, source: str, text: str) -> None:
    outcome = run(notebook, f"import ipywidgets as w\n{source}")
    shown = outcome.text() + "".join(data["text/plain"] for data in bundles(outcome))
    assert shown.startswith(text), shown
    assert shown.count("(a rank's widget is its text") == 1, shown
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in bundles(outcome))


def test_updates_of_one_of_several_ranks(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "h = display(f'first {rank}', display_id=True)\nfor i in range(100): rank == 1 and "
        "h.update(f'{i}')",
    )
    assert area(outcome) == ["[0] 'first 0'", "[1] '99'", "[2] 'first 2'"]
    assert sum(kind == "update_display_data" for kind, _ in outcome.messages) < 100
    later = run(notebook, "h.update(HTML(f'<b>{rank}</b>'))")
    assert [data["text/html"][-8:] for data in later.data("update_display_data")] == [
        f"<b>{rank}</b>" for rank in range(3)
    ]


def test_a_rank_clears_what_is_its_own(notebook: Notebook) -> None:
    source = (
        "print('all')\nprint('mine', 'abc'[rank])\ndist.barrier()\nif rank == 1: clear_output()\n"
    )
    assert area(run(notebook, source)) == ["[0,2] all", "[0] mine a", "[2] mine c"]
    waiting = (
        "print('all')\ndist.barrier()\nif rank == 1:\n    clear_output(wait=True)\n    print('new')"
    )
    assert area(run(notebook, waiting)) == ["[0,2] all", "[1] new"]
    assert area(run(notebook, "print('old')\nclear_output(wait=True)\nprint('new')")) == [
        "[0-2] new"
    ]


def test_an_animation_in_a_flood_shows_its_end(notebook: Notebook) -> None:
    source = (
        "for step in range(2000):\n    clear_output(wait=True)\n    display(f'step {step} of "
        "{chr(97 + rank)}')\ndist.barrier()\nprint('end')"
    )
    outcome = run(notebook, source)
    steps = [line for line in area(outcome) if "step" in line]
    assert sorted(steps) == [f"[{rank}] 'step 1999 of {'abc'[rank]}'" for rank in range(3)]
    assert any("end" in line for line in area(outcome))
    assert len(outcome.messages) < 2000


# ---- the switch


def test_a_failed_cell_has_the_errors_in_the_switch(notebook: Notebook) -> None:
    outcome = notebook.run(
        "%%dist\nprint('before')\ndist.barrier()\nif rank == 2:\n    raise ValueError('<odd>')"
    )
    assert outcome.status == "error"
    [switch] = switches(outcome)
    part = switch.partition(">2</summary>")[2].partition("</details>")[0]
    assert "before" in part
    assert "&lt;odd&gt;" in part
    assert 'style="color:' in part
    assert "\x1b" not in switch
    assert ">0-1</summary>" in switch


def test_tabs_include_later_output_of_threads(notebook: Notebook) -> None:
    source = (
        "%%dist\nimport threading\ngo = threading.Event()\nprint('a', rank)\nprint('b')\n"
        "t = threading.Thread(target=lambda: (go.wait(), print('late', rank)))\nt.start()"
    )
    first = notebook.send(source)
    [switch] = switches(notebook.finish(first))
    assert "late" not in switch
    notebook.run("%%dist\ngo.set(); t.join()")
    outcome = notebook.read_until(first, lambda o: bool(o.data("update_display_data")))
    assert "late 2" in outcome.data("update_display_data")[-1]["text/html"]


def test_background_cell_gets_its_tabs_at_its_end(notebook: Notebook) -> None:
    notebook.run(
        "from pathlib import Path; import tempfile; folder = tempfile.mkdtemp()\n%dist_push folder"
    )
    cell = notebook.send(
        "%%dist --nowait\nimport time, pathlib\nwhile not pathlib.Path(folder, 'go').exists(): "
        "time.sleep(0.02)\nprint('x', rank); print('y')"
    )
    assert switches(notebook.finish(cell)) == []
    notebook.run("Path(folder, 'go').touch()")
    outcome = notebook.read_until(cell, lambda o: bool(switches(o)))
    assert ">2</summary>" in switches(outcome)[0]


def test_the_switch_can_be_turned_off(notebook: Notebook) -> None:
    source = "%%dist\nprint('a')\nprint(rank)"
    assert len(switches(notebook.run(source))) == 1
    notebook.run("mesh.tabs = False")
    try:
        assert switches(notebook.run(source)) == []
    finally:
        notebook.run("mesh.tabs = True")
    assert switches(notebook.run("mesh.cell('print(1)\\nprint(rank)')")) == [], (
        "a loop may have a thousand"
    )
    assert switches(notebook.run("%%dist -q\nprint('a')\nprint(rank)")) == []


def test_a_flood_keeps_the_switch_small(notebook: Notebook) -> None:
    outcome = notebook.run("%%dist\nfor i in range(50_000): print(i, rank, 'x' * 50)")
    [switch] = switches(outcome)
    assert len(switch) <= 200_000
    for rank in range(3):
        part = switch.partition(f">{rank}</summary>")[2].partition("</details>")[0]
        assert f"49999 {rank} " in part
        assert f"%dist_logs {rank}" in part
