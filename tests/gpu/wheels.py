"""Gather the wheels that a GPU machine without a network needs: `make gpu-wheels`.

Such a machine brings torch, what torch needs, and numpy. The rest of what cellmesh and tests/gpu
import is downloaded for the machine's Python, in the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
BROUGHT = {"numpy", "torch"}
WANTED = ("cellmesh", "matplotlib", "nbclient", "pytest", "pytest-timeout")
LIMIT_BYTES = 60 << 20  # with the checkout


def closure(wanted: Iterable[str], python_version: str) -> set[str]:
    """Names of the distributions that these need, without those that the machine brings."""
    full = f"{python_version}.0"
    target = {"python_version": python_version, "python_full_version": full, "extra": ""}
    found: set[str] = set()
    queue = list(wanted)
    while queue:
        name = canonicalize_name(queue.pop())
        if name in found | BROUGHT:
            continue
        found.add(name)
        needs = [Requirement(line) for line in requires(name) or ()]
        queue += [
            need.name for need in needs if need.marker is None or need.marker.evaluate(target)
        ]
    return found - {"cellmesh"}


def pins() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }


def main() -> int:
    """Download the wheels into a directory; returns 1 if they and the checkout are too large to
    carry.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    for old in options.directory.glob("*.whl"):
        old.unlink()
    versions = pins()
    names = sorted(closure(WANTED, options.python_version))
    tags = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    platforms = [
        word
        for tag in [*tags, "manylinux2014_x86_64", "manylinux1_x86_64"]
        for word in ("--platform", tag)
    ]
    command = (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *("--python-version", options.python_version, "--implementation", "cp", *platforms),
        *("--dest", str(options.directory), *(f"{name}=={versions[name]}" for name in names)),
    )
    subprocess.run(command, check=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    total = sum(path.stat().st_size for path in (*files, *options.directory.glob("*.whl")))
    print(f"{len(names)} wheels and the checkout: {total / 1e6:.1f} MB")
    return int(total > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
