"""Notebooks with a mesh, and the launcher of scripts, for a module's programs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir
from tests.exactness.comparing import Losses
from tests.exactness.launcher import launcher
from tests.exactness.launching import Job
from tests.mesh.test_kernel import Notebook, open_notebook


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" in metafunc.fixturenames:
        metafunc.parametrize("program", metafunc.module.PROGRAMS, ids=str)


@pytest.fixture(scope="package", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What all ways of running a program share."""
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("localhost", 0)) as server:
        patch.setenv("OMP_NUM_THREADS", "1")  # the number decides in which order a sum is added up
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PROGRAM_PORT", str(server.getsockname()[1]))
        server.close()
        yield


@pytest.fixture(scope="module")
def launch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Job], Losses]]:
    with launcher(
        tmp_path_factory.mktemp("launched"), *getattr(request.module, "MODULES", ())
    ) as launched:
        yield launched


@pytest.fixture(scope="module")
def notebook_of(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Notebook]]:
    """A notebook with a mesh of some size; each is started once."""
    modules = ",".join(getattr(request.module, "MODULES", ()))
    opened: dict[int, Notebook] = {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(own_runtime_dir())

        def open_with(num_ranks: int) -> Notebook:
            if num_ranks not in opened:
                notebook = opened[num_ranks] = stack.enter_context(open_notebook())
                preload = f" --preload {modules}" if modules else ""
                outcome = notebook.run(
                    f"%load_ext cellmesh\n%dist_start {num_ranks} --settle 0.1{preload}"
                )
                assert outcome.status == "ok", outcome.errors()
            return opened[num_ranks]

        yield open_with
        for notebook in opened.values():
            assert notebook.run("%dist_stop").status == "ok"
        check_nothing_left(directory)
