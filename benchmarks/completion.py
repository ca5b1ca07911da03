"""How long Tab takes: from a front end's request to a kernel's answer, for names that live on
ranks.

``python -m benchmarks.completion``: a real kernel and a mesh of `NUM_RANKS`, on idle ranks, on
ranks that sleep in a cell, that compute in torch, and that run Python without a pause. The floor is
the same kernel's answer for names of its own, in a plain cell. Above `LIMIT_S` the notebook would
complete alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from jupyter_client.manager import start_new_kernel

from benchmarks.machine import describe_machine
from benchmarks.units import MILLISECONDS

NUM_RANKS = 4
NUM_CALLS = 20
LIMIT_S = 0.15
_WAIT_S = 120.0

_SETUP = """%%dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(100)])

model = Net()
state = model.state_dict()
"""
_STATES = {
    "idle": "",
    "asleep in a cell": "import time\nwhile True:\n    time.sleep(0.01)",
    "computing in torch": "x = torch.randn(512, 512)\nwhile True:\n    x = (x @ x) / x.norm()",
    "running Python": "n = 0\nwhile True:\n    n += 1",
}
_ASKED = {
    "a name": ("mod", "model"),
    "an attribute": ("model.layers[40].wei", "weight"),
    "a key": ("state['layers.77.", "layers.77.weight"),
    "a large module": ("torch.", "ones"),
}


class Kernel:
    """A kernel and its client."""

    def __init__(self) -> None:
        self._manager, self._client = start_new_kernel(startup_timeout=_WAIT_S)

    def run(self, source: str) -> None:
        """Run a cell.

        Raises:
            RuntimeError: it failed.
        """
        content: dict[str, Any] = self._client.execute(source, reply=True, timeout=_WAIT_S)[
            "content"
        ]
        if content["status"] != "ok":
            raise RuntimeError("\n".join(content.get("traceback", [content["status"]])))

    def complete(self, code: str) -> tuple[float, list[str]]:
        """How long an answer took, and what it was."""
        begin = time.perf_counter()
        content = self._client.complete(code, reply=True, timeout=_WAIT_S)["content"]
        return time.perf_counter() - begin, content["matches"]

    def close(self) -> None:
        """End it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()


def _show(what: str, seconds: Sequence[float], num_answered: int) -> None:
    late = sum(each > LIMIT_S for each in seconds)
    print(
        f"{what:<46} median {MILLISECONDS.show(statistics.median(seconds)):>10}   slowest "
        f"{MILLISECONDS.show(max(seconds)):>10}   answered {num_answered}/{len(seconds)}, late "
        f"{late}"
    )


def _measure(kernel: Kernel, what: str, code: str, expected: str, num_calls: int) -> None:
    answers = [kernel.complete(code) for _ in range(num_calls)]
    answered = sum(expected in matches for _, matches in answers)
    _show(what, [seconds for seconds, _ in answers], answered)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=NUM_CALLS)
    num_calls = parser.parse_args(arguments).calls
    print(", ".join(describe_machine().values()))
    kernel = Kernel()
    try:
        kernel.run(f"%load_ext cellmesh\n%dist_start {NUM_RANKS}")
        kernel.run(_SETUP)
        seconds, matches = kernel.complete("%%dist\nmodel.layers[40].wei")
        _show("the first of all, after the start", [seconds], int("weight" in matches))
        for state, source in _STATES.items():
            if source:
                kernel.run(f"%%dist --nowait\n{source}")
                time.sleep(1.0)  # until all ranks are at it
            asked = {"a name": _ASKED["a name"]} if source else _ASKED
            for what, (code, expected) in asked.items():
                _measure(kernel, f"{what}, ranks {state}", f"%%dist\n{code}", expected, num_calls)
            if source:
                kernel.run("%dist_interrupt")
                kernel.run("for run in mesh.runs:\n    run.wait()")
        kernel.run("class Net: pass\nmodel = Net()\nmodel.weight = 1")
        kernel.complete("model.wei")  # jedi is imported
        _measure(kernel, "floor: an attribute in a plain cell", "model.wei", "weight", num_calls)
        kernel.run("%dist_stop")
    finally:
        kernel.close()


if __name__ == "__main__":
    main()
