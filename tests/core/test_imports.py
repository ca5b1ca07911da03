"""Imports point one way, and what a notebook imports does not import torch."""

from __future__ import annotations

import pytest

import cellmesh
from tests.conftest import run_python
from tests.support.import_graph import (
    MODULES,
    PACKAGE,
    circles,
    imported_by,
    imports_of_modules,
    name_of,
)

# Which parts of the package a part may import, besides itself. The files at the top are their own
# parts.
ALLOWED = {
    "errors": set(),
    "stdlib": set(),
    "wire": {"errors"},
    "workers": {"wire", "errors", "stdlib"},
    "controller": {"wire", "errors", "stdlib"},
    "magics": {"controller", "wire", "errors"},
    "cli": {"magics", "controller", "workers", "wire", "errors", "__init__"},
    "__init__": {"controller", "magics", "errors", "wire"},
    "__main__": {"cli"},
}
# What a notebook, a terminal and an agent begin with: none of them needs torch.
ENTRIES = [
    "cellmesh",
    "cellmesh.controller.mesh",
    "cellmesh.controller.session.start",
    "cellmesh.magics.extension",
    "cellmesh.cli.main",
    "cellmesh.workers.agent.agent",
]


def part_of(name: str) -> str:
    """The part that a full name of ours belongs to."""
    _, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if part in ALLOWED else "__init__"


def test_imports_point_one_way() -> None:
    wrong = {}
    for path in MODULES:
        relative = path.relative_to(PACKAGE)
        part = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        assert part in ALLOWED, f"{part} is new: say here what it may import"
        ours = {part_of(name) for name in imported_by(path) if name.partition(".")[0] == "cellmesh"}
        if too_many := ours - {part} - ALLOWED[part]:
            wrong[str(relative)] = too_many
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and those that only type checkers read count as well."""
    assert circles(imports_of_modules()) == []


def test_no_two_folders_import_each_other() -> None:
    folder_of = {name_of(path): name_of(path.parent / "__init__.py") for path in MODULES}
    pairs = {
        (folder_of[name], folder_of[other])
        for name, imported in imports_of_modules(is_run=True).items()
        for other in imported
    }
    assert not [
        (one, other)
        for one, other in pairs
        if one < other and (other, one) in pairs and not other.startswith(f"{one}.")
    ]


def test_torch_is_not_imported() -> None:
    heavy = "print(*sorted({'torch', 'numpy', 'zmq'} & {*sys.modules}))"
    script = f"import sys, cellmesh; {heavy}; import {', '.join(ENTRIES)}; {heavy}"
    result = run_python("-c", script)
    package, entries = result.stdout.splitlines()
    assert package == ""
    assert "torch" not in entries.split()


def test_a_start_launches_before_it_imports_the_session() -> None:
    """A mesh's zygote imports torch in the time of the imports that the launch does not need."""
    script = "import sys, cellmesh.controller.session.start; print(*sys.modules)"
    result = run_python("-c", script)
    imported = set(result.stdout.split())
    assert not imported & {"zmq", "asyncio", "psutil", "cloudpickle", "email", "secrets"}
    assert "cellmesh.controller.session.session" not in imported
    assert len(imported & set(map(name_of, MODULES))) <= 27


def test_public_names_are_those_of_their_homes() -> None:
    from cellmesh.controller.mesh import Mesh
    from cellmesh.controller.run import Results, Run

    assert (cellmesh.Mesh, cellmesh.Results, cellmesh.Run) == (Mesh, Results, Run)
    assert callable(cellmesh.start)
    assert set(cellmesh.__all__) <= set(dir(cellmesh))
    with pytest.raises(AttributeError, match="no attribute 'strat'"):
        cellmesh.strat  # noqa: B018
