"""A JupyterLab for all modules; for each a browser, a page and a notebook that its tests share.

A module may say ``SCALE``, the device pixels a CSS pixel in its pictures.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.lab import (
    Notebook,
    Server,
    SharedNotebook,
    browse,
    new_page,
    open_notebook,
    serve,
)


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


@pytest.fixture(scope="module")
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """It is blank at first."""
    with new_page(browser, getattr(request.module, "SCALE", 1)) as page:
        yield page


@pytest.fixture(scope="module")
def shared(page: Page, server: Server) -> Iterator[SharedNotebook]:
    shared = SharedNotebook(lambda: open_notebook(page, server, "shared.ipynb"))
    yield shared
    shared.close()


@pytest.fixture
def notebook(shared: SharedNotebook, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """An empty notebook whose kernel has the extension, and a mesh's zygote, but no mesh."""
    failures = request.session.testsfailed
    is_given_back = False
    try:
        yield shared.take()
        if request.session.testsfailed == failures:
            shared.give_back()
            is_given_back = True
    finally:
        if not is_given_back:
            shared.close(has_failed=True)
