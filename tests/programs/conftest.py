"""Notebooks with a mesh, and the launcher of scripts, for a module's programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import check_nothing_left, own_runtime_dir
from tests.exactness.comparing import Losses
from tests.exactness.launcher import launcher
from tests.exactness.launching import Job
from tests.mesh.test_kernel import Notebook, open_notebook

Launch = Callable[[Job], Losses]
# What takes each rank of many programs long to import, the first for any optimizer; a mesh's zygote
# and the launcher import it once.
TORCH = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
)


def modules_of(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the modules that are imported before a test module's ranks are forked."""
    return (*TORCH, *getattr(request.module, "MODULES", ()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" in metafunc.fixturenames:
        metafunc.parametrize("program", metafunc.module.PROGRAMS, ids=str)


@pytest.fixture(scope="package", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What all ways of running a program share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the number decides in which order a sum is added up
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="package")
def launchers(
    environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Launch]]:
    """A launcher that has imported some modules; each is started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def launcher_with(*modules: str) -> Launch:
            return stack.enter_context(launcher(tmp_path_factory.mktemp("launched"), *modules))

        yield launcher_with


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, launchers: Callable[..., Launch]) -> Launch:
    return launchers(*modules_of(request))


@pytest.fixture(scope="module")
def notebook_of(
    request: pytest.FixtureRequest, shared_prestart: object
) -> Iterator[Callable[[int], Notebook]]:
    """A notebook with a mesh of some size; each is started once."""
    modules = ",".join(modules_of(request))
    opened: dict[int, Notebook] = {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(own_runtime_dir())

        def open_with(num_ranks: int) -> Notebook:
            if num_ranks in opened and not opened[num_ranks].is_idle():
                # A test gave up on its cell: the tests behind it must not wait for that cell.
                opened.pop(num_ranks).manager.shutdown_kernel(now=True)
            if num_ranks not in opened:
                notebook = opened[num_ranks] = stack.enter_context(open_notebook())
                outcome = notebook.run(
                    f"%load_ext cellmesh\n%dist_start {num_ranks} --settle 0.1 --preload {modules}"
                )
                assert outcome.status == "ok", outcome.errors()
            return opened[num_ranks]

        yield open_with
        for notebook in opened.values():
            assert notebook.run("%dist_stop").status == "ok"
        check_nothing_left(directory)
