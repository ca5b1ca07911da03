"""What people see of a mesh on two hosts: JupyterLab in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.lab import Notebook, Server, browse, new_page, open_notebook, serve
from tests.faults.watching import wait_until

from .netns import Host

WAIT_S = 60.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def browser(machines: list[Host]) -> Iterator[Browser]:
    """A browser on the notebook's host."""
    chromium = shutil.which("chromium")
    assert chromium, "this needs chromium"
    with browse(chromium) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with new_page(browser) as page:
        yield page


@pytest.fixture(scope="module")
def server(machines: list[Host]) -> Iterator[Server]:
    """A JupyterLab on the notebook's host, whose kernels know the hosts."""
    with serve() as server:
        yield server


def rows(notebook: Notebook) -> list[list[str]]:
    """The rows of ``%dist_status``: rank, host and state of each."""
    table = notebook.run("%dist_status").texts()[-1]
    lines = [line.split("\t") for line in table.splitlines() if "\t" in line]
    assert lines[0][:5] == ["rank", "host", "pid", "device", "state"]
    return [[line[0], line[1], line[4]] for line in lines[1:]]


def test_lost_host_is_shown_and_replaced(page: Page, server: Server, machines: list[Host]) -> None:
    with open_notebook(page, server, "hosts.ipynb") as notebook:
        notebook.run(
            "%load_ext cellmesh\n"
            "%dist_start --hosts cm1:2,cm2:2 --host-lease 4 --mesh host=2,gpu=2",
            timeout_s=60,
        )
        notebook.run("%%dist\nkept = rank + 5")
        assert [row[1:] for row in rows(notebook)] == [["cm1", "idle"]] * 2 + [["cm2", "idle"]] * 2
        machines[1].cut()
        assert rows(notebook)[1:3] == [
            ["1", "cm1", "idle"],
            ["2", "cm2", "idle when its host was heard last"],
        ]
        failed = notebook.run("%%dist\nkept", timeout_s=60).texts()
        assert "cm2 (ranks 2-3) is lost: without a connection since" in "\n".join(failed)
        last = rows(notebook)[3]
        assert last[:2] == ["3", "cm2"]
        assert re.match(r"dead: was on cm2, which is lost: without a connection since \d", last[2])
        notebook.picture("lost host")
        healed = notebook.run("%dist_heal --hosts cm3:2", timeout_s=90).texts()
        assert healed[0].startswith("ranks 2-3 are new and empty, process groups rebuilt")
        assert [row[1] for row in rows(notebook)] == ["cm1", "cm1", "cm3", "cm3"]
        cell = "%%dist\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x), globals().get('kept')"
        shown = notebook.run(cell).texts()
        assert shown == ["[0] (4, 5)\n[1] (4, 6)\n[2-3] (4, None)"]
        notebook.picture("replaced host")
        machines[1].mend()
        wait_until(lambda: not machines[1].meshes(), WAIT_S, "the replaced agent has ended")
        notebook.run("%dist_stop", timeout_s=60)


def test_stop_button_reaches_the_ranks_of_all_hosts(
    page: Page, server: Server, machines: list[Host]
) -> None:
    with open_notebook(page, server, "stop.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start --hosts cm1:2,cm2:2", timeout_s=60)
        cell = notebook.start(
            "%%dist\nkept = rank + 5\nif rank == 0:\n    while True: pass\ndist.barrier()"
        )
        expect(cell.outputs.last).to_have_text(
            re.compile(r"ranks 1-3 wait in barrier \(line 5\) \d+ s; rank 0 runs line 4.*"),
            timeout=20_000,
        )
        notebook.press_stop()
        cell.wait_for_end()
        assert (
            "RanksInterrupted: rank 0 raised KeyboardInterrupt: interrupted in the cell (line 4); "
            "ranks 1-3 raised KeyboardInterrupt: interrupted in barrier (line 5)"
        ) in cell.texts()
        shown = notebook.run("%%dist\ndist.barrier()\nkept").texts()
        assert shown == ["[0] 5\n[1] 6\n[2] 7\n[3] 8"]
        notebook.run("%dist_stop", timeout_s=60)
