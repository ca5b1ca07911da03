"""docs/apis.md says what the notebooks show; the reader of notebooks that writes it."""

from __future__ import annotations

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.notebooks import apis
from tests.notebooks.apis import where
from tests.notebooks.catalogue import LEFT_OUT, SECTIONS, Api, Section
from tests.notebooks.kernels import NOTEBOOKS
from tests.notebooks.reading import How, Uses, canonical, find, read

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def notebooks() -> dict[str, Uses]:
    return apis.load()


def _code(source: str, count: int | None = 1, **metadata: object) -> NotebookNode:
    cell = new_code_cell(source, metadata=metadata)
    cell.execution_count = count
    return cell


def uses_of(*sources: str) -> Uses:
    """What cells with these sources use, each of which was run."""
    return read(new_notebook(cells=[_code(source) for source in sources]))


def test_page_of_apis_matches_the_notebooks(notebooks: dict[str, Uses]) -> None:
    page = apis.PAGE.read_text(encoding="utf-8")
    assert page == apis.render(notebooks), "to write it: python -m tests.notebooks.apis"


def test_every_api_has_a_notebook_or_a_reason(notebooks: dict[str, Uses]) -> None:
    assert apis.without_notebook(notebooks) == []


def test_every_api_is_in_the_installed_torch() -> None:
    listed = [api.path for section in SECTIONS for api in section.apis]
    assert [path for path in listed if find(path) is None] == []
    assert len(set(listed)) == len(listed), "listed twice"


def test_every_public_name_is_listed_or_left_out_with_a_reason() -> None:
    assert apis.unlisted() == []


def test_unlisted_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [out for out in LEFT_OUT if "get_pg_count" not in out.names]
    listed = [section for section in SECTIONS if not section.title.startswith("Uneven")]
    monkeypatch.setattr(apis, "LEFT_OUT", left)
    monkeypatch.setattr(apis, "SECTIONS", listed)
    missing = {name.rpartition(".")[2] for name in apis.unlisted()}
    assert missing == {"get_pg_count", "Join", "JoinHook", "Joinable"}


def test_left_out_name_exists_once_and_is_not_listed() -> None:
    names = [f"{out.module}.{name}" for out in LEFT_OUT for name in out.names]
    assert [name for name in names if find(name) is None] == []
    assert len(set(names)) == len(names), "left out twice"
    listed = {canonical(api.path) for section in SECTIONS for api in section.apis}
    assert [name for name in names if canonical(name) in listed] == []


RUN, GPU, REFUSED, NOT_RUN = How.RUN, How.GPU, How.REFUSED, How.NOT_RUN
GUARDED = "%%dist\ntry:\n    f()\nexcept ValueError:\n    ok = False"
# Cells -> how each of the functions of torch.distributed in them is used.
CELLS: list[tuple[list[str], dict[str, How]]] = [
    (["%%dist\n# dist.send\nprint('dist.recv')\nfrom torch.distributed import gather"], {}),
    (["dist.barrier()"], {}),  # the notebook's own name
    (["%dist_auto on", "dist.recv()", "%%local\ndist.send"], {"recv": RUN}),
    (["%%dist --ranks 0\nfrom torch.distributed import send", "%%dist\nif rank: send(x)"],
     {"send": RUN}),
    (["%%dist\n!ls\n%timeit 1\ndist.barrier()\nawait other", "%%bash\nls -l |"],
     {"barrier": RUN}),
    (["%%dist\nif device.type == 'cuda':\n    dist.send()\nelse:\n    dist.recv()"],
     {"send": GPU, "recv": RUN}),
    (["%%dist\nif device.type != 'cuda':\n    pass\nelse:\n    dist.send()"], {"send": GPU}),
    (["%%dist\ndist.send() if dist.get_backend() == 'nccl' else None"],
     {"send": GPU, "get_backend": RUN}),
    (["%%dist\ntry:\n    dist.send(x)\nexcept ValueError:\n    dist.recv(x)"],
     {"send": REFUSED, "recv": REFUSED}),
    (["%%dist\ntry:\n    dist.send(x)\nfinally:\n    dist.recv(x)"], {"send": RUN, "recv": RUN}),
    (["%%dist\nwith contextlib.suppress(ValueError):\n    dist.send(x)"], {"send": REFUSED}),
    ([GUARDED + "\ny = dist.send(x) if ok else None"], {"send": REFUSED}),
    ([GUARDED, "%%dist\nif ok:\n    dist.send(x)\ndist.recv(x)"],
     {"send": REFUSED, "recv": RUN}),
]  # fmt: skip


@pytest.mark.parametrize(("sources", "found"), CELLS)
def test_names_are_resolved_and_judged(sources: list[str], found: dict[str, How]) -> None:
    paths = uses_of(*sources).paths
    names = {path.removeprefix("torch.distributed."): how for path, how in paths.items()}
    assert {name: how for name, how in names.items() if name != "torch.distributed"} == found


def test_failed_or_unrun_cells_are_reported_and_the_best_cell_counts() -> None:
    failed = _code("%%dist\ndist.gather")
    failed.outputs = [new_output("error", ename="ValueError", evalue="", traceback=[])]
    shows = _code("%%dist\ndist.send", tags=["raises-exception"])
    tries = _code("%%dist\ndist.recv", tags=["shows-errors"])
    idle = _code("%%dist\ndist.reduce\ndist.scatter", count=None)
    scatters = _code("%%dist\ndist.scatter")
    paths = read(new_notebook(cells=[failed, shows, tries, idle, scatters])).paths
    found = [paths[f"torch.distributed.{name}"] for name in ("gather", "send", "recv", "reduce")]
    assert found == [REFUSED, REFUSED, REFUSED, NOT_RUN]
    assert paths["torch.distributed.scatter"] is RUN


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
    wraps = "%%dist\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m).no_sync()"
    notebooks = {"uses.ipynb": uses_of(wraps), "other.ipynb": uses_of("%%dist\nother.no_sync()")}
    assert where(method, section, notebooks) == {"uses.ipynb": RUN}


def test_an_api_is_shown_with_its_notebook_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, recv = Api("torch.distributed.barrier"), Api("torch.distributed.recv")
    own = Api("torch.distributed.send", own_part="a wire", title="the sender")
    scatter = Api("torch.distributed.scatter", "told elsewhere")
    section = Section("One", "https://example.org", (barrier, recv, own, scatter))
    monkeypatch.setattr(apis, "SECTIONS", (section,))
    source = "dist.send(x)\ntry:\n    dist.recv(x)\nexcept ValueError:\n    pass"
    used = {"01_one.ipynb": uses_of(f"%%dist\n{source}")}
    assert apis.without_notebook(used) == ["torch.distributed.barrier"]
    page = apis.render(used)
    assert "| `barrier` | not in a notebook: ? | – | – |" in page
    assert "| `recv` | [01] | refused here, shown with its error | not run |" in page
    own_part = "run, with a part of the notebook's own: a wire"
    assert f"| `the sender` | [01] | {own_part} | not run |" in page
    assert "| `scatter` | not in a notebook: told elsewhere | – | – |" in page
    assert "[01]: ../notebooks/01_one.ipynb" in page
    assert "4 APIs; 2 are in notebooks, 1 of them run on CPU." in page


def test_the_tests_execute_every_notebook_that_is_read(notebooks: dict[str, Uses]) -> None:
    assert list(notebooks) == [path.name for path in NOTEBOOKS]
