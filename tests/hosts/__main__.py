"""Runs the tests of this folder, two files at a time: ``python -m tests.hosts [FILE ...]``.

Each file gets a network of its own to make hosts in, so that names, addresses and ports of two
files do not meet. Most of a test's time is a wait for a lease to end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
REPORTS = Path("artifacts/hosts")
# These take the longest, so they begin first.
_LONG = ("test_attach.py", "test_faults.py", "test_notebooks.py", "test_slurm.py", "test_ssh.py")
_NUM_AT_A_TIME = 2
# `ip netns` keeps names of networks in /run/netns.
_ENTER = 'mkdir -p /run/netns; mount -t tmpfs tmpfs /run/netns; ip link set lo up; exec "$@"'
_NEEDS = ("unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", _ENTER)


def run(path: Path) -> int:
    """Run the tests of a file, print what pytest prints at once at its end, return its status."""
    report = f"--junitxml={REPORTS / path.stem}.xml"
    command = (*_NEEDS, "sh", sys.executable, "-m", "pytest", str(path), report)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    return done.returncode


def main(names: list[str]) -> int:
    """Run the tests of these files, or of all; return 1 if any has failed."""
    paths = [Path(name) for name in names] or sorted(HERE.glob("test_*.py"))
    paths.sort(key=lambda path: path.name not in _LONG)
    shutil.rmtree(REPORTS, ignore_errors=True)
    with ThreadPoolExecutor(_NUM_AT_A_TIME) as pool:
        statuses = list(pool.map(run, paths))
    failed = [path.name for path, status in zip(paths, statuses, strict=True) if status]
    print(f"tests/hosts: {len(paths)} files, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
