"""What the inspector asks of real ranks: at the same time, and of ranks that run something."""

from __future__ import annotations

import concurrent.futures

from cellmesh.controller.inspect import InspectionSource
from cellmesh.controller.mesh import Mesh
from cellmesh.magics.widgets.inspector.inspector import ask_element, ask_picture
from cellmesh.wire.inspect import Pixels

CONTENT = {
    "path": "", "rank": 1, "minus": None, "dims": [0, 1], "index": [0, 0],
    "rows": [0, 3], "cols": [0, 4], "height": 3, "width": 4, "reduction": "mean",
}  # fmt: skip


def test_looks_at_the_same_time_are_in_nobodys_way(mesh: Mesh) -> None:
    """A look makes no rank busy, and of a computed value all are about the same."""
    mesh.cell("count = iter(range(9))\nw = torch.arange(12.0).reshape(3, 4) * rank")
    answers = InspectionSource(mesh.rank_set, "w.clone() + next(count)")
    assert sorted(answers.inspect(False)) == [0, 1, 2, 3]

    def ask(number: int) -> object:
        if number % 2:
            return ask_element(answers, {**CONTENT, "index": [2, 3]})
        return isinstance(ask_picture(answers, CONTENT), Pixels)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        told = list(pool.map(ask, range(80)))
    assert told == [True, {"text": "11.0"}] * 40
    assert not answers.is_busy()


def test_a_rank_that_runs_is_asked_beside(mesh: Mesh) -> None:
    mesh.cell("import threading\ngate = threading.Event()\nw = torch.ones(3, 4)")
    run = mesh.submit_cell("w.fill_(5)\ngate.wait(60)")
    answers = InspectionSource(mesh.rank_set, "w")
    assert answers.is_busy()
    while not isinstance(shown := ask_picture(answers, CONTENT), Pixels) or shown.high != 5.0:
        assert not run.done()
    assert shown.is_torn
    assert "the rank is busy" in str(
        ask_picture(InspectionSource(mesh.rank_set, "w.clone()"), CONTENT)
    )
    run.interrupt()
    run.wait(30)
