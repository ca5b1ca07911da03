"""An inspector in a bare page: no JupyterLab, no kernel, and ranks that are namespaces of this
process.
"""

from __future__ import annotations

import base64
import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect

from cellmesh.controller.inspect import InspectionSource
from cellmesh.magics.views.inspector.inspector import Inspector
from tests.browser.lab import PICTURES

_TRAITS = ("summary", "detail", "watch", "outdated", "ended")
# What JupyterLab's themes say of the names that base.css reads.
_DARK = (
    "--jp-ui-font-color1:#fff;--jp-ui-font-color2:#bdbdbd;--jp-layout-color1:#111;"
    "--jp-layout-color2:#424242;--jp-border-color2:#616161;--jp-brand-color1:#2196f3;"
    "--jp-error-color1:#ef5350;"
)
_PAGE = """
<!doctype html><meta charset="utf-8"><style>{css}</style>
<body style="{theme}margin:12px"><div id="root"></div></body>
"""
_START = """
async ([source, state]) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const widget = (await import(url)).default;
  const listeners = new Map();
  const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const heard = (name) => listeners.get(name) ?? [];
  const fire = (name, ...args) => { for (const call of [...heard(name)]) call(...args); };
  const model = {
    get: (key) => state[key],
    set: (key, value) => { state[key] = value; fire(`change:${key}`); },
    save_changes: () => {},
    send: (content) => window.tellKernel(JSON.stringify(content)),
    on: (name, call) => listeners.set(name, [...heard(name), call]),
    off: (name, call) => listeners.set(name, heard(name).filter((one) => one !== call)),
  };
  widget.render({ model, el: document.getElementById("root") });
  const poll = async () => {
    for (const [kind, content, buffers] of JSON.parse(await window.hearKernel())) {
      if (kind === "state") {
        for (const [key, value] of Object.entries(content)) model.set(key, value);
      } else fire("msg:custom", content, buffers.map(decode));
    }
    setTimeout(poll, 15);
  };
  poll();
}
"""


class Kernel:
    """Takes the front end's messages to an inspector, and back."""

    def __init__(self, inspector: Inspector) -> None:
        self.inspector = inspector
        self.sent_bytes: list[int] = []
        self.is_deaf = False  # as where a cell runs that must end first
        self._unheard: list[str] = []
        self._outbox: queue.SimpleQueue[tuple[str, dict[str, Any], list[str]]] = queue.SimpleQueue()
        widget: Any = inspector.widget
        widget.send = self._send
        widget.observe(self._note, names=list(_TRAITS))

    def tell(self, text: str) -> None:
        """The front end says something."""
        if self.is_deaf:
            self._unheard.append(text)
            return
        self.inspector._hear(self.inspector.widget, json.loads(text), [])

    def listen(self) -> None:
        """What has been said meanwhile is heard, too."""
        self.is_deaf = False
        said, self._unheard = self._unheard, []
        for text in said:
            self.tell(text)

    def hear(self) -> str:
        """What the front end is told now."""
        found = []
        while not self._outbox.empty():
            found.append(self._outbox.get())
        return json.dumps(found)

    def _send(self, content: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.sent_bytes.append(sum(map(len, buffers)))
        self._outbox.put(("message", content, [base64.b64encode(one).decode() for one in buffers]))

    def _note(self, change: Any) -> None:
        self._outbox.put(("state", {change.name: change.new}, []))


@contextmanager
def open_page(
    browser: Browser,
    answers: InspectionSource,
    *,
    dark: bool = False,
    width: int = 1000,
    is_deaf: bool = False,
) -> Iterator[tuple[Page, Kernel]]:
    """An inspector in a page; if it is deaf, the kernel hears nothing until `Kernel.listen`."""
    inspector = Inspector(answers)
    kernel = Kernel(inspector)
    kernel.is_deaf = is_deaf
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.clock.install()  # it goes on; a test may have it jump
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.expose_function("tellKernel", kernel.tell)
    page.expose_function("hearKernel", kernel.hear)
    theme = f"{_DARK}background:#111;color:#fff;" if dark else "background:#fff;"
    page.set_content(_PAGE.format(css=inspector.widget._css, theme=theme))
    state = {name: getattr(inspector.widget, name) for name in _TRAITS}
    page.evaluate(_START, [str(inspector.widget._esm), json.loads(json.dumps(state))])
    try:
        yield page, kernel
    finally:
        context.close()
    assert errors == []


def keep(page: Page, name: str) -> None:
    """Keep a picture of the page in `PICTURES`."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def open_heatmap(page: Page) -> Locator:
    """The canvas, once there is a picture in it."""
    page.get_by_role("tab", name="Heatmap").click()
    canvas = page.locator("canvas")
    expect(canvas).to_have_attribute("data-shown", "1")
    return canvas


def element_at(canvas: Locator, x: float, y: float) -> tuple[int, int]:
    """Which element lies at a place of the canvas (shares of its width and height)."""
    top, bottom, left, right = map(float, (canvas.get_attribute("data-view") or "").split())
    return int(top + y * (bottom - top)), int(left + x * (right - left))


def value_at(page: Page, canvas: Locator, x: float, y: float) -> tuple[tuple[int, ...], str]:
    """Return the index and the value that the page shows for the element at a place of a heatmap,
    once the pixel has been drawn.
    """
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=2)
    value = page.locator(".cmi-value[data-final=true]")
    expect(value).to_be_visible()
    index = tuple(map(int, (value.get_attribute("data-index") or "").split(",")))
    return index, value.get_attribute("data-value") or ""


def wait_for_new_picture(canvas: Locator, shown: int) -> None:
    expect(canvas).not_to_have_attribute("data-shown", str(shown))


def opacity(canvas: Locator) -> int:
    """Of a picture's middle: 0 without one, 255 of what is looked at, less of what was before."""
    middle = "c => c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data[3]"
    return int(canvas.evaluate(middle))


def shown(canvas: Locator) -> int:
    return int(canvas.get_attribute("data-shown") or 0)
