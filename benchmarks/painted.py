"""How long a person waits for a heatmap: from the request in JupyterLab's page to the painted
canvas.

``python -m benchmarks.painted``: JupyterLab in headless Chromium, one rank with a float32 tensor of
4096 x 4096, the inspector open at its heatmap. Each round changes how the whole tensor is reduced,
which asks the rank anew, and waits for the frame after the one in which the canvas was drawn.
Beside it the floor of the same page: the same for a tensor of 496 x 496, of which every element is
sent as it is.
"""

from __future__ import annotations

import argparse
import shutil
import statistics

from playwright.sync_api import Browser, Locator

from benchmarks.machine import describe_machine
from tests.browser.lab import Server, browse, open_notebook, serve
from tests.browser.test_widgets import open_heatmap, opened

SIDES = {"4096 x 4096, reduced": 4096, "496 x 496, as it is": 496}
REDUCTIONS = ("mean", "absmax", "stride")
# Changes the reduction as a person would, and tells the milliseconds until the canvas has been
# painted.
_CHANGE = """
async (canvas, reduction) => {
  const select = document.querySelector('select[aria-label="reduce by"]');
  const painted = new Promise((resolve) => {
    const watch = new MutationObserver(() => {
      watch.disconnect();
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
    });
    watch.observe(canvas, { attributeFilter: ["data-shown"] });
  });
  const begin = performance.now();
  select.value = reduction;
  select.dispatchEvent(new Event("change"));
  return (await painted) - begin;
}
"""


def _time(canvas: Locator, num_rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {reduction: [] for reduction in REDUCTIONS}
    for _ in range(num_rounds):
        for reduction in (*REDUCTIONS[1:], REDUCTIONS[0]):  # each is a change
            times[reduction].append(canvas.evaluate(_CHANGE, reduction))
    return times


def _measure(
    browser: Browser, server: Server, side: int, num_rounds: int
) -> dict[str, list[float]]:
    with open_notebook(browser, server, f"{side}.ipynb") as notebook:
        notebook.run("%load_ext cellmesh\n%dist_start 1", 60)
        notebook.run(f"%%dist\nx = torch.randn({side}, {side})")
        canvas = open_heatmap(opened(notebook.run("%dist_inspect x")))
        _time(canvas, 2)
        return _time(canvas, num_rounds)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium on this machine (Debian: apt-get install chromium)")
    print(", ".join(describe_machine().values()))
    print("\n| tensor | reduction | median ms | middle half |\n|---|---|---|---|")
    with serve() as server, browse(chromium) as browser:
        for name, side in SIDES.items():
            for reduction, times in _measure(browser, server, side, options.rounds).items():
                low, median, high = statistics.quantiles(times, n=4)
                print(f"| {name} | {reduction} | {median:.0f} | {low:.0f}-{high:.0f} |", flush=True)


if __name__ == "__main__":
    main()
