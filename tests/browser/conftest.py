"""A JupyterLab for all modules, with a browser for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser.lab import Server, browse, serve


@pytest.fixture(scope="session")
def jupyterlab() -> Iterator[Server]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def server(jupyterlab: Server) -> Iterator[Server]:
    """It serves nothing yet."""
    yield jupyterlab
    for path in jupyterlab.notebooks.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # For each module: where it is, an event loop runs, and nothing else may run one.
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine (Debian: apt-get install chromium)")
    with browse(chromium) as browser:
        yield browser
