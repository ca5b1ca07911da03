"""docs/apis.md says what the notebooks show; the reader of notebooks that writes it."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks import apis
from tests.notebooks.apis import where
from tests.notebooks.catalogue import LEFT_OUT, SECTIONS, Api, Section
from tests.notebooks.kernels import NOTEBOOKS
from tests.notebooks.reading import How, Uses, canonical, find, read

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def notebooks() -> dict[str, Uses]:
    return apis.load()


def _notebook(*cells: NotebookNode) -> NotebookNode:
    for number, cell in enumerate(cells, 1):
        if cell.cell_type == "code":
            cell.setdefault("execution_count", number)
            cell.execution_count = cell.metadata.pop("count", number)
    return new_notebook(cells=list(cells))


def _code(source: str, **metadata: object) -> NotebookNode:
    return new_code_cell(source, metadata=metadata)


def test_page_of_apis_matches_the_notebooks(notebooks: dict[str, Uses]) -> None:
    page = apis.PAGE.read_text(encoding="utf-8")
    assert page == apis.render(notebooks), "to write it: python -m tests.notebooks.apis --write"


def test_every_api_has_a_notebook_or_a_reason(notebooks: dict[str, Uses]) -> None:
    assert apis.without_notebook(notebooks) == []


def test_every_api_is_in_the_installed_torch() -> None:
    listed = [api.path for section in SECTIONS for api in section.apis]
    assert [path for path in listed if find(path) is None] == []
    assert len(set(listed)) == len(listed), "listed twice"


def test_every_public_name_is_listed_or_left_out_with_a_reason() -> None:
    assert apis.unlisted() == []


def test_unlisted_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        apis, "LEFT_OUT", tuple(out for out in LEFT_OUT if "Joinable" not in out.names)
    )
    join = next(section for section in SECTIONS if section.title.startswith("Uneven"))
    monkeypatch.setattr(
        apis, "SECTIONS", tuple(section for section in SECTIONS if section is not join)
    )
    missing = apis.unlisted()
    assert [name.rpartition(".")[2] for name in missing] == ["Join", "JoinHook", "Joinable"]


def test_left_out_name_exists_once_and_is_not_listed() -> None:
    names = [f"{out.module}.{name}" for out in LEFT_OUT for name in out.names]
    assert [name for name in names if find(name) is None] == []
    assert len(set(names)) == len(names), "left out twice"
    listed = {canonical(api.path) for section in SECTIONS for api in section.apis}
    assert [name for name in names if canonical(name) in listed] == []


def test_prose_comments_strings_and_bare_imports_do_not_count() -> None:
    uses = read(
        _notebook(
            new_markdown_cell("`dist.all_reduce(x)`"),
            _code(
                "%%dist\n# dist.broadcast\nprint('dist.barrier()')\nfrom torch.distributed import "
                "gather"
            ),
        )
    )
    assert uses.paths == {}


def test_names_are_resolved_through_imports() -> None:
    uses = read(
        _notebook(
            _code(
                "%%dist --ranks 0\nimport torch.distributed.checkpoint as dcp\nfrom torch import nn"
            ),
            _code(
                "%%dist\nif rank:\n    dcp.save({}, 'here')\nnn.Linear(1, 1)\ndist.all_reduce(nn)"
            ),
        )
    )
    used = ["torch.distributed.checkpoint.save", "torch.nn.Linear", "torch.distributed.all_reduce"]
    assert [uses.paths[path] for path in used] == [How.RUN] * 3


def test_names_of_the_notebook_are_not_those_of_the_ranks() -> None:
    assert read(_notebook(_code("dist.barrier()"))).paths == {}
    with_auto = read(
        _notebook(_code("%dist_auto on"), _code("dist.barrier()"), _code("%%local\ndist.send"))
    )
    assert "torch.distributed.barrier" in with_auto.paths
    assert "torch.distributed.send" not in with_auto.paths


def test_lines_of_magics_and_shell_are_passed_over() -> None:
    uses = read(
        _notebook(
            _code("%%dist\n!ls\n%timeit 1\ndist.barrier()\nawait other"), _code("%%bash\nls -l |")
        )
    )
    assert "torch.distributed.barrier" in uses.paths


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda':\n    dist.barrier()",
        "if torch.cuda.is_available():\n    dist.barrier()",
        "dist.barrier() if dist.get_backend() == 'nccl' else None",
        "if device.type != 'cuda':\n    pass\nelse:\n    dist.barrier()",
    ],
)
def test_gpu_only_names_are_reported(source: str) -> None:
    uses = read(_notebook(_code(f"%%dist\n{source}")))
    assert uses.paths["torch.distributed.barrier"] is How.GPU


def test_the_other_branch_runs_everywhere() -> None:
    uses = read(
        _notebook(_code("%%dist\nif device.type == 'cuda':\n    pass\nelse:\n    dist.barrier()"))
    )
    assert uses.paths["torch.distributed.barrier"] is How.RUN


def test_failed_or_unrun_cells_are_reported_and_the_best_cell_counts() -> None:
    shows = _code("%%dist\ndist.send", tags=["raises-exception"])
    tries = _code("%%dist\ndist.recv", tags=["shows-errors"])
    idle = _code("%%dist\ndist.reduce\ndist.scatter")
    idle.metadata["count"] = None
    uses = read(_notebook(shows, tries, idle, _code("%%dist\ndist.scatter")))
    found = {
        name: uses.paths[f"torch.distributed.{name}"]
        for name in ("send", "recv", "reduce", "scatter")
    }
    assert found == {
        "send": How.REFUSED,
        "recv": How.REFUSED,
        "reduce": How.NOT_RUN,
        "scatter": How.RUN,
    }


def test_a_cell_that_failed_does_not_count_as_run() -> None:
    failed = _code("%%dist\ndist.send")
    failed.outputs = [new_output("error", ename="ValueError", evalue="", traceback=[])]
    assert read(_notebook(failed)).paths["torch.distributed.send"] is How.REFUSED


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    dist.send(x)\nexcept ValueError:\n    pass",
        "try:\n    pass\nexcept ValueError:\n    dist.send(x)",
        "with contextlib.suppress(ValueError):\n    dist.send(x)",
        "ok = True\ntry:\n    f()\nexcept ValueError:\n    ok = False\nif ok:\n    dist.send(x)",
        "try:\n    f()\nexcept ValueError:\n    ok = False\ny = dist.send(x) if ok else None",
    ],
)
def test_cell_that_may_not_have_ended_does_not_count(source: str) -> None:
    uses = read(_notebook(_code(f"%%dist\n{source}")))
    assert uses.paths["torch.distributed.send"] is How.REFUSED


def test_the_outcome_of_a_caught_error_is_known_in_later_cells() -> None:
    tries = _code("%%dist\ntry:\n    f()\nexcept ValueError:\n    ok = False")
    uses = read(_notebook(tries, _code("%%dist\nif ok:\n    dist.send(x)\ndist.recv(x)")))
    assert uses.paths["torch.distributed.send"] is How.REFUSED
    assert uses.paths["torch.distributed.recv"] is How.RUN


def test_try_and_finally_alone_catch_nothing() -> None:
    uses = read(_notebook(_code("%%dist\ntry:\n    dist.send(x)\nfinally:\n    dist.recv(x)")))
    assert {uses.paths[f"torch.distributed.{name}"] for name in ("send", "recv")} == {How.RUN}


def test_aliases_are_one_thing() -> None:
    assert canonical("torch.distributed.init_device_mesh") == canonical(
        "torch.distributed.device_mesh.init_device_mesh"
    )
    assert canonical("torch.distributed.no_such_thing") == "torch.distributed.no_such_thing"
    assert find("torch.distributed.no_such_thing") is None


def test_methods_count_in_notebooks_of_their_section() -> None:
    wrap = "torch.nn.parallel.DistributedDataParallel"
    method = Api(f"{wrap}.no_sync", is_method=True)
    section = Section("DDP", "", (Api(wrap), method))
    from_parallel = (
        "%%dist\nfrom torch.nn.parallel import "
        "DistributedDataParallel as DDP\nwith DDP(m).no_sync():\n    "
        "1"
    )
    notebooks = {
        "uses.ipynb": read(_notebook(_code(from_parallel))),
        "other.ipynb": read(_notebook(_code("%%dist\nwith other.no_sync():\n    1"))),
    }
    assert where(method, section, notebooks) == {"uses.ipynb": How.RUN}


def test_an_api_without_notebook_or_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, send = (
        Api("torch.distributed.barrier"),
        Api("torch.distributed.send", "told elsewhere"),
    )
    monkeypatch.setattr(apis, "SECTIONS", (Section("One", "https://example.org", (barrier, send)),))
    assert apis.without_notebook({}) == ["torch.distributed.barrier"]
    used = {"01_one.ipynb": read(_notebook(_code("%%dist\ndist.barrier()")))}
    assert apis.without_notebook(used) == []
    page = apis.render(used)
    assert "| `barrier` | [01] | run | not run |" in page
    assert "[01]: ../notebooks/01_one.ipynb" in page
    assert "| `send` | not in a notebook: told elsewhere | – | – |" in page
    assert "2 APIs; 1 are in notebooks, 1 of them run on CPU." in page


def test_name_added_by_a_notebook_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Api("torch.distributed.send", own_part="a wire", title="the sender")
    recv, scatter = Api("torch.distributed.recv"), Api("torch.distributed.scatter")
    section = Section("One", "https://example.org", (send, recv, scatter))
    monkeypatch.setattr(apis, "SECTIONS", (section,))
    refused = (
        "try:\n    dist.recv(x)\nexcept ValueError:\n    pass\nif "
        "device.type == 'cuda':\n    dist.scatter(x)"
    )
    page = apis.render({"01_one.ipynb": read(_notebook(_code(f"%%dist\ndist.send(x)\n{refused}")))})
    assert (
        "| `the sender` | [01] | run, with a part of the notebook's own: a wire | not run |" in page
    )
    assert "| `recv` | [01] | refused here, shown with its error | not run |" in page
    assert "| `scatter` | [01] | needs a GPU, not run | not run |" in page


def test_the_tests_execute_every_notebook_that_is_read(notebooks: dict[str, Uses]) -> None:
    assert list(notebooks) == [
        path.name for path in NOTEBOOKS
    ]  # tests/notebooks and tests/exactness run these


def test_the_notebooks_are_read_as_they_are_stored(notebooks: dict[str, Uses]) -> None:
    stored = [path.name for path in sorted((apis.ROOT / "notebooks").glob("*.ipynb"))]
    assert list(notebooks) == stored
    for name in stored:
        nbformat.validate(nbformat.read(apis.ROOT / "notebooks" / name, as_version=4))
