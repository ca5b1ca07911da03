"""JupyterLab, driven as a person would: type a cell, press Shift+Enter, look."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect, sync_playwright

from tests.conftest import write_ipython_profile

PICTURES = Path(__file__).resolve().parents[2] / "artifacts" / "browser"
START_S = 60.0
END_S = 30.0
LOOK_S = 30.0

_SETTINGS = {
    # Cells out of sight are in the page, too.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # On a loaded machine, a second is short.
    "completer-extension/manager": {"providerTimeout": 20_000},
}
# Not at ports, which are chosen before a kernel binds them: what else runs may be given one
# by then.
_KERNELS = {"KernelManager": {"transport": "ipc"}}
# The server prints its address before it binds it. Linux gives no other process one of these ports
# in between: those that it chooses itself begin at 32768 (ip_local_port_range).
_PORTS = range(20_000, 32_000)
_CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
_SIZE = ViewportSize(width=1000, height=900)
_CHROME = 130  # what menu and toolbar take of the height
# The indicator in the toolbar says idle before there is a kernel, and a cell that is run then does
# nothing.
_KERNEL_IS_IDLE = (
    "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status"
    " === 'idle'"
)
_IS_OPEN = (
    "(name) => window.jupyterapp?.shell.currentWidget?.context?.contentsModel?.path === name "
    "&& window.jupyterapp.shell.currentWidget.context.isReady"
)
_CLOSE = """(name) => {
  for (const widget of [...(window.jupyterapp?.shell.widgets("main") ?? [])]) {
    if (widget.context?.path === name) widget.dispose();  // `close` would ask whether to save it
  }
}"""
_CLEAR = """() => {
  const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
  const count = model.cells.length;
  model.insertCell(count, { cell_type: "code" });
  model.deleteCellRange(0, count);
}"""
_EXECUTE = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  await kernel.requestExecute({ code, store_history: false }).done;
}"""
_BLANK = "about:blank"
_RAN = re.compile(r"^\[\d+\]:$")


@dataclass(frozen=True)
class Application:
    """A front end that Jupyter serves."""

    module: str
    config: str  # the name of its configuration
    options: Mapping[str, Mapping[str, Any]]
    path: str  # of notebooks, below the server's address
    landing: str  # the path that it prints when it listens


LAB = Application(
    "jupyterlab",
    "jupyter_lab_config",
    {"LabApp": {"expose_app_in_browser": True, "extension_manager": "readonly"}},
    "doc/tree",
    "lab",
)
NOTEBOOK = Application(
    "notebook",
    "jupyter_notebook_config",
    {"JupyterNotebookApp": {"expose_app_in_browser": True}},
    "notebooks",
    "tree",
)


@dataclass(frozen=True)
class Server:
    """A Jupyter of our own on the loopback interface."""

    home: Path  # its configuration, notebooks and runtime directory are below it
    token: str
    port: int = 0  # 0 before it listens
    application: Application = LAB

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def notebooks(self) -> Path:
        """The directory that it serves."""
        return self.home / "notebooks"

    @property
    def runtime(self) -> Path:
        """Its runtime directory; meshes have theirs below it."""
        return self.home / "run"

    def write(self, name: str, notebook: NotebookNode) -> None:
        """Put a notebook where it is served."""
        nbformat.write(notebook, self.notebooks / name)

    def processes(self) -> list[psutil.Process]:
        """The server and all that was started below it, orphans too."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("JUPYTER_RUNTIME_DIR") == str(self.runtime):
                    found.append(process)
            except psutil.Error:  # it has just ended
                continue
        return found

    def shut_down(self, name: str) -> None:
        """Shut down the kernel of a notebook, if it has one."""
        for session in self._request("GET"):
            if session["path"] == name:
                self._request("DELETE", f"/{session['id']}")

    def _request(self, method: str, path: str = "") -> Any:
        """Have the server list sessions, or end one."""
        headers = {"Authorization": f"token {self.token}"}
        url = f"{self.url}/api/sessions{path}"
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=END_S) as answer:
            return json.loads(answer.read() or b"null")

    def meshes(self) -> set[Path]:
        """The directories of meshes."""
        return set((self.runtime / "cellmesh").glob("*"))

    def left_over(self) -> list[str]:
        """What is still there of meshes, after they have had time to end."""
        meshes = sorted(map(str, self.meshes()))
        _, running = psutil.wait_procs(self.processes(), timeout=END_S)
        return [*meshes, *map(str, running)]


@contextlib.contextmanager
def serve(application: Application = LAB) -> Iterator[Server]:
    """Run a server; in the end nothing that it started may be left."""
    with tempfile.TemporaryDirectory(prefix="cm-") as directory:  # short: sockets' addresses are
        server = Server(Path(directory), secrets.token_hex(16), application=application)
        server.notebooks.mkdir()
        for name, settings in _SETTINGS.items():
            path = server.home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        process, port = _start(server)
        try:
            yield replace(server, port=port)
        finally:
            process.terminate()
            process.wait(END_S)
        left = server.left_over()
        assert left == []


def _start(server: Server) -> tuple[subprocess.Popen[str], int]:
    home, application = server.home, server.application
    config = home / "config" / f"{application.config}.json"
    config.parent.mkdir()
    write_ipython_profile(home / "ipython", prestart_s=600.0)
    config.write_text(json.dumps({**application.options, **_KERNELS}))
    process = subprocess.Popen(
        [
            sys.executable, "-m", application.module, "--no-browser", "--allow-root",
            "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={secrets.choice(_PORTS)}",
            f"--ServerApp.root_dir={server.notebooks}",
        ],
        env={
            **os.environ,
            "JUPYTER_TOKEN": server.token,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(server.runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "IPYTHONDIR": str(home / "ipython"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    settled = threading.Event()
    address = re.compile(rf"http://127\.0\.0\.1:(\d+)/{application.landing}")
    lines: list[str] = []
    ports: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if found := address.search(line):
                    ports.append(int(found[1]))
                    settled.set()
        settled.set()  # it has ended

    threading.Thread(target=read, daemon=True).start()
    settled.wait(START_S)
    if not ports or not _accepts(ports[0], process):
        process.kill()
        process.wait()
        raise RuntimeError(f"{application.module} did not start:\n" + "".join(lines))
    return process, ports[0]


def _accepts(port: int, process: subprocess.Popen[str]) -> bool:
    """Wait until a server accepts connections; return False if it has ended, or takes too long."""
    end_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        time.sleep(0.02)  # a listening socket announces itself to nobody
    return False


@contextlib.contextmanager
def browse(chromium: str) -> Iterator[Browser]:
    """Run this headless Chromium, which reaches nothing but this machine."""
    expect.set_options(timeout=LOOK_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_CHROMIUM_OPTIONS)
        yield browser
        browser.close()


class Cell:
    """A code cell in the page, by its element."""

    def __init__(self, root: Locator) -> None:
        self.root = root

    @property
    def outputs(self) -> Locator:
        """Its outputs, an element each, without the switch between ranks."""
        return self.root.locator(".jp-OutputArea-output:not(:has(.cellmesh-ranks))")

    def texts(self) -> list[str]:
        """The text of each of its outputs; a live line that was taken away leaves an empty one."""
        return [text.rstrip("\n") for text in self.outputs.all_inner_texts() if text.strip()]

    def number(self) -> int:
        """The number in its prompt, once it has ended."""
        return int(self.root.locator(".jp-InputPrompt").inner_text().strip("[]:"))

    def wait_for_end(self, timeout_s: float = 30.0) -> None:
        """Wait until its prompt is a number again."""
        expect(self.root.locator(".jp-InputPrompt")).to_have_text(_RAN, timeout=timeout_s * 1000)


class Notebook:
    """A notebook open in a page; its last cell is empty and takes what is typed."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.cells = self.panel.locator(".jp-CodeCell")

    def cell(self, index: int) -> Cell:
        """A code cell by its place."""
        return Cell(self.cells.nth(index))

    def start(self, source: str) -> Cell:
        """Type a cell and run it, without waiting for its end."""
        number = self.cells.count()
        cell = self.cell(number - 1)
        cell.root.locator(".cm-content").click()
        self.page.keyboard.insert_text(source)
        expect(cell.root.locator(".cm-content")).to_contain_text(source.rpartition("\n")[2])
        self.page.keyboard.press("Shift+Enter")
        expect(self.cells).to_have_count(number + 1)
        return cell

    def run(self, source: str, timeout_s: float = 30.0) -> Cell:
        """Type a cell, run it, wait for its end."""
        cell = self.start(source)
        cell.wait_for_end(timeout_s)
        return cell

    def wait_for_kernel(self) -> None:
        """Wait until the kernel is idle."""
        self.page.wait_for_function(_KERNEL_IS_IDLE, timeout=START_S * 1000)

    def press_stop(self) -> None:
        """Press the toolbar's stop button."""
        self.panel.locator('jp-button[data-command="notebook:interrupt-kernel"]').click()

    def save(self) -> None:
        """Save the notebook, and wait until it is."""
        self.command("docmanager:save")
        expect(self.page.locator(".lm-DockPanel .jp-mod-dirty")).to_have_count(0)

    def clear(self) -> None:
        """Delete all cells; an empty one is left."""
        self.page.evaluate(_CLEAR)
        expect(self.cells).to_have_count(1)

    def execute(self, source: str) -> None:
        """Have the kernel execute this, of which the notebook shows nothing."""
        self.page.evaluate(_EXECUTE, source)

    def picture(self, name: str, first: int = 0, last: int = -1) -> None:
        """Keep a picture of some cells, text cells counted too, in `PICTURES`."""
        self.page.keyboard.press("Escape")
        content = self.panel.locator(".jp-WindowedPanel-outer")
        height = content.evaluate("element => element.scrollHeight")
        self.page.set_viewport_size({**_SIZE, "height": height + 2 * _CHROME})
        content.evaluate("element => element.scrollTo(0, 0)")
        cells = self.panel.locator(".jp-Cell")
        top, bottom = cells.nth(first).bounding_box(), cells.nth(last).bounding_box()
        assert top is not None
        assert bottom is not None
        height = bottom["y"] + bottom["height"] - top["y"]
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(
            path=PICTURES / f"{name}.png",
            clip={"x": top["x"], "y": top["y"], "width": top["width"], "height": height},
        )
        self.page.set_viewport_size(_SIZE)

    def command(self, name: str, arguments: dict[str, str] | None = None) -> None:
        """Run one of JupyterLab's commands; returns at once."""
        # Not returned: some commands' promises end with the work that they begin.
        self.page.evaluate(
            "([name, args]) => { window.jupyterapp.commands.execute(name, args) }",
            [name, arguments or {}],
        )


@contextlib.contextmanager
def new_page(browser: Browser, scale: float = 1) -> Iterator[Page]:
    """Open a blank page; the first notebook that is opened there loads the front end, and it serves
    the next ones, too. The scale is that of pictures.
    """
    context = browser.new_context(viewport=_SIZE, device_scale_factor=scale, color_scheme="light")
    yield context.new_page()
    context.close()


@contextlib.contextmanager
def open_notebook(page: Page, server: Server, name: str) -> Iterator[Notebook]:
    """Open a notebook, a new one if there is none; in the end its kernel is shut down, and all that
    it began. A notebook that is open in the page stays open behind this one.
    """
    if not (server.notebooks / name).exists():
        kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        server.write(name, new_notebook(cells=[new_code_cell()], metadata={"kernelspec": kernel}))
    before, meshes = server.processes(), server.meshes()
    notebook = Notebook(page)
    has_failed = True
    try:
        if page.url == _BLANK:
            page.goto(f"{server.url}/{server.application.path}/{name}?token={server.token}")
        else:
            notebook.command("docmanager:open", {"path": name})
        page.wait_for_function(_IS_OPEN, arg=name, timeout=START_S * 1000)
        notebook.wait_for_kernel()
        yield notebook
        has_failed = False
    finally:
        started = [process for process in server.processes() if process not in before]
        server.shut_down(name)
        if has_failed:  # whatever is open there: a dialog, a menu
            page.goto(_BLANK)
        else:
            page.evaluate(_CLOSE, name)
        if server.meshes() - meshes:
            # A mesh outlives its kernel, under its lease.
            subprocess.run(
                [sys.executable, "-m", "cellmesh", "stop", "--all"],
                env={**os.environ, "JUPYTER_RUNTIME_DIR": str(server.runtime)},
                check=True,
                capture_output=True,
                timeout=END_S,
            )
    _, running = psutil.wait_procs(started, timeout=END_S)
    assert running == []


class SharedNotebook:
    """A notebook and its kernel that one test after the other has, until one of them fails."""

    def __init__(self, open_one: Callable[[], AbstractContextManager[Notebook]]) -> None:
        self._open_one = open_one
        self._stack = contextlib.ExitStack()
        self._notebook: Notebook | None = None

    def take(self) -> Notebook:
        """Return the notebook without cells but the empty one, and with the extension loaded."""
        if self._notebook is None:
            notebook = self._stack.enter_context(self._open_one())
            notebook.run("%load_ext cellmesh", timeout_s=60)
            self._notebook = notebook
        self._notebook.clear()
        self._notebook.page.set_viewport_size(_SIZE)
        return self._notebook

    def give_back(self) -> None:
        """Stop the mesh that there is."""
        if self._notebook is not None:
            self._notebook.wait_for_kernel()
            self._notebook.execute("%dist_stop")

    def close(self, has_failed: bool = False) -> None:
        """Shut the kernel down; the page is loaded again if a failure has left a dialog there."""
        if self._notebook is not None and has_failed:
            self._notebook.page.goto(_BLANK)
        self._notebook = None
        self._stack.close()
