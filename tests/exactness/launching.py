"""Run as ``python -m torch.distributed.run launching.py SCRIPT FOLDER``: runs the script, keeps its losses.

Each rank leaves ``FOLDER/RANK.json``: the script's `losses`, exactly, as `float.hex` writes them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    """Run the script as if it had been given to torchrun itself."""
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv[:] = [str(script)]
    sys.path[0] = str(script.parent)
    names = runpy.run_path(str(script), run_name="__main__")
    losses = [float(loss).hex() for loss in names["losses"]]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(losses))
    time.sleep(0.5)  # for gloo's threads, as in exported scripts: see cellmesh/magics/export/frame.py


if __name__ == "__main__":
    main()
