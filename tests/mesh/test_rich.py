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

from tests.conftest import clean_runtime_dir

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
    with clean_runtime_dir(), open_notebook() as opened:
        assert opened.run("%load_ext cellmesh").status == "ok"
        assert opened.run("%dist_start 3").status == "ok"
        opened.run(
            "%%dist\nfrom IPython.display import *\nimport pandas, matplotlib.pyplot as plt, "
            "PIL.Image"
        )
        yield opened
        assert opened.run("%dist_stop").status == "ok"


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


def test_plots_of_several_ranks(notebook: Notebook) -> None:
    outcome = run(notebook, "plt.figure(figsize=(2, 1)); plt.plot([0, rank]); plt.show()")
    shown = bundles(outcome)
    assert sorted(label["text/plain"] for label in shown[::2]) == ["[0]", "[1]", "[2]"]
    for figure in shown[1::2]:
        assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    [switch] = switches(outcome)
    assert switch.count("<img ") == 3
    assert "<details" in switch


def test_plotly_is_drawn_by_the_front_end_and_sends_no_program(notebook: Notebook) -> None:
    notebook.run(
        "%%dist\nimport plotly.graph_objects as go\nfigure = go.Figure(go.Scatter(y=[0, rank // "
        "2]))\n"
        "figure.show()"  # the first time takes ranks unequally long
    )
    above, first, below, second = bundles(run(notebook, "figure.show()"))
    assert (above["text/plain"], below["text/plain"]) == ("[0-1]", "[2]")
    assert first["application/vnd.plotly.v1+json"]["data"][0]["type"] == "scatter"
    assert second["text/plain"] == "<application/vnd.plotly.v1+json>"
    assert "text/html" not in first
    [_, as_value] = bundles(run(notebook, "figure if rank == 0 else None"))
    assert "application/vnd.plotly.v1+json" in as_value


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("HTML('<i>x</i>')", "text/html"),
        ("Math('x^2')", "text/latex"),
        ("Video(b'1234', embed=True, mimetype='video/mp4')", "text/html"),
        ("Javascript('1 + 1')", "application/javascript"),
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
        ("w.interact(lambda p: print('power', p), p=(1, 4));", "[0-2] power 2\n"),
    ],
    ids=["value", "interact"],
)
def test_a_widget_is_its_text(notebook: Notebook, source: str, text: str) -> None:
    outcome = run(notebook, f"import ipywidgets as w\n{source}")
    shown = outcome.text() + "".join(data["text/plain"] for data in bundles(outcome))
    assert shown.startswith(text), shown
    assert shown.count("(a rank's widget is its text") == 1, shown
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in bundles(outcome))


# ---- the switch
