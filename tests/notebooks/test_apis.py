"""docs/apis.md says what the notebooks show; the reader of notebooks that writes it."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.notebooks import apis
from tests.notebooks.apis import How, Uses, canonical, find, read, where
from tests.notebooks.catalogue import SECTIONS, Api, Section

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


def test_the_page_is_what_the_notebooks_show(notebooks: dict[str, Uses]) -> None:
    page = apis.PAGE.read_text(encoding="utf-8")
    assert page == apis.render(notebooks), "to write it: python -m tests.notebooks.apis --write"


def test_every_api_has_a_notebook_or_a_reason(notebooks: dict[str, Uses]) -> None:
    assert apis.without_notebook(notebooks) == []


def test_every_api_is_in_the_installed_torch() -> None:
    listed = [api.path for section in SECTIONS for api in section.apis]
    assert [path for path in listed if find(path) is None] == []
    assert len(set(listed)) == len(listed), "listed twice"


def test_prose_comments_strings_and_bare_imports_do_not_count() -> None:
    uses = read(
        _notebook(
            new_markdown_cell("`dist.all_reduce(x)`"),
            _code("%%dist\n# dist.broadcast\nprint('dist.barrier()')\nfrom torch.distributed import gather"),
        )
    )
    assert uses.paths == {}


def test_names_are_resolved_through_imports() -> None:
    uses = read(
        _notebook(
            _code("%%dist --ranks 0\nimport torch.distributed.checkpoint as dcp\nfrom torch import nn"),
            _code("%%dist\nif rank:\n    dcp.save({}, 'here')\nnn.Linear(1, 1)\ndist.all_reduce(nn)"),
        )
    )
    used = ["torch.distributed.checkpoint.save", "torch.nn.Linear", "torch.distributed.all_reduce"]
    assert [uses.paths[path] for path in used] == [How.RUN] * 3


def test_names_of_the_notebook_are_not_those_of_the_ranks() -> None:
    assert read(_notebook(_code("dist.barrier()"))).paths == {}
    with_auto = read(_notebook(_code("%dist_auto on"), _code("dist.barrier()"), _code("%%local\ndist.send")))
    assert "torch.distributed.barrier" in with_auto.paths
    assert "torch.distributed.send" not in with_auto.paths


def test_lines_of_magics_and_shell_are_passed_over() -> None:
    uses = read(
        _notebook(_code("%%dist\n!ls\n%timeit 1\ndist.barrier()\nawait other"), _code("%%bash\nls -l |"))
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
def test_what_runs_on_gpus_only_is_told(source: str) -> None:
    uses = read(_notebook(_code(f"%%dist\n{source}")))
    assert uses.paths["torch.distributed.barrier"] is How.GPU


def test_the_other_branch_runs_everywhere() -> None:
    uses = read(_notebook(_code("%%dist\nif device.type == 'cuda':\n    pass\nelse:\n    dist.barrier()")))
    assert uses.paths["torch.distributed.barrier"] is How.RUN


def test_cells_that_show_errors_or_did_not_run_are_told_and_the_best_counts() -> None:
    shows = _code("%%dist\ndist.send", tags=["raises-exception"])
    tries = _code("%%dist\ndist.recv", tags=["shows-errors"])
    idle = _code("%%dist\ndist.reduce\ndist.scatter")
    idle.metadata["count"] = None
    uses = read(_notebook(shows, tries, idle, _code("%%dist\ndist.scatter")))
    found = {name: uses.paths[f"torch.distributed.{name}"] for name in ("send", "recv", "reduce", "scatter")}
    assert found == {"send": How.FAILS, "recv": How.FAILS, "reduce": How.NOT_RUN, "scatter": How.RUN}


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
        "%%dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nwith DDP(m).no_sync():\n    1"
    )
    notebooks = {
        "uses.ipynb": read(_notebook(_code(from_parallel))),
        "other.ipynb": read(_notebook(_code("%%dist\nwith other.no_sync():\n    1"))),
    }
    assert where(method, section, notebooks) == {"uses.ipynb": How.RUN}


def test_an_api_without_notebook_or_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, send = Api("torch.distributed.barrier"), Api("torch.distributed.send", "told elsewhere")
    monkeypatch.setattr(apis, "SECTIONS", (Section("One", "https://example.org", (barrier, send)),))
    assert apis.without_notebook({}) == ["torch.distributed.barrier"]
    used = {"01_one.ipynb": read(_notebook(_code("%%dist\ndist.barrier()")))}
    assert apis.without_notebook(used) == []
    page = apis.render(used)
    assert "| `barrier` | [01] | run | not run |" in page
    assert "[01]: ../notebooks/01_one.ipynb" in page
    assert "| `send` | told elsewhere | – | – |" in page
    assert "2 APIs; 1 are in notebooks, 1 of them run on CPU." in page


def test_the_notebooks_are_read_as_they_are_stored(notebooks: dict[str, Uses]) -> None:
    stored = [path.name for path in sorted((apis.ROOT / "notebooks").glob("*.ipynb"))]
    assert list(notebooks) == stored
    for name in stored:
        nbformat.validate(nbformat.read(apis.ROOT / "notebooks" / name, as_version=4))
