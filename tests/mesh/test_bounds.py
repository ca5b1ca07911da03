"""What user code can make large: so much of it comes to the notebook, and what was cut is said."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

import cellmesh as cm
from cellmesh.controller.output.fold import Rich, Trace
from cellmesh.wire import transport
from tests.conftest import own_runtime_dir

from .conftest import Recorder

_LARGE = 50 << 20


@pytest.fixture(scope="module")
def mesh() -> Iterator[cm.Mesh]:
    with own_runtime_dir(), cm.start(2) as started:
        started.cell("import sys, cellmesh, tqdm\nfrom IPython.display import HTML, display")
        started.cell(f"large = 'x' * {_LARGE}\nshown = HTML(large)")
        yield started


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("display(shown)", r"bytes, not shown: .* and 2 MiB/s\)"),
        ("raise ValueError(large)", r"characters\)|…"),
        ("error = ValueError('no')\nerror.add_note(large)\nraise error", "ValueError: no|…"),
        ("cellmesh.log(**{f'n{i}': 1 for i in range(100_000)})", "100,000 names"),
        ("for _ in tqdm.tqdm(range(3), desc=large): pass", ""),
        ("import os; os.write(1, large.encode())", ""),
    ],
)
def test_messages_to_the_notebook_are_bounded(
    mesh: cm.Mesh, cell: str, told: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    receive = transport.receive

    def count(socket: Any) -> Any:
        frames = receive(socket)
        sizes.append(sum(map(len, frames)))
        return frames

    monkeypatch.setattr(transport, "receive", count)
    with contextlib.suppress(cm.RankFailure):
        mesh.submit_cell(cell, sink=recorder).result()
    assert sum(sizes) < (80 << 20 if "display" in cell else 1 << 20)
    shown = "\n".join(
        [
            *(text for _, text in recorder.lines()),
            *(f"{trace.item.type_name}: {trace.item.text}" for trace in recorder.items(Trace)),
            *recorder.notes,
        ]
    )
    assert re.search(told, shown), shown[-2000:]
    assert len(shown) < 2_000_000
    assert len(recorder.items(Rich)) <= 64


def test_a_large_exception_stays_on_its_rank_and_says_so(mesh: cm.Mesh) -> None:
    with pytest.raises(cm.RankFailure) as caught:
        mesh.cell("error = ValueError('no')\nerror.large = large\nraise error")
    for error in caught.value.exceptions_by_rank.values():
        assert "its pickle has 52,4" in str(error)
        assert "at most 4 MiB are sent to the notebook" in str(error)
    assert mesh.pull("len(sys.last_value.large)") == {0: _LARGE, 1: _LARGE}
