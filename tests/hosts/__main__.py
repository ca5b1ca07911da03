"""Runs the tests of this folder, two files at a time, and up to four while that leaves a good part
of the machine idle: ``python -m tests.hosts [FILE ...]``.

Each file gets a network of its own to make hosts in, so that names, addresses and ports of two
files do not meet. Most of a test's time is a wait for a lease to end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import psutil

HERE = Path(__file__).parent
REPORTS = Path("artifacts/hosts")
# These take the longest, so they begin first; a cluster of Ray has one minute to come up.
_LONG = ("test_notebooks.py", "test_ray.py", "test_attach.py", "test_slurm.py", "test_ssh.py")
_LEAST, _MOST = 2, 4
# So much of the processors may be in use, in percent, over so many seconds, where one more begins.
_IN_USE, _LOOK_S = 60, 10
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


def wait_for_room(running: Collection[Future[int]]) -> None:
    """Wait until one more file can be run beside these."""
    while len(running) >= _LEAST:
        psutil.cpu_percent()  # the next one is of the time from here
        limit_s = _LOOK_S if len(running) < _MOST else None
        if wait(running, limit_s, FIRST_COMPLETED).done or psutil.cpu_percent() < _IN_USE:
            return


def main(names: list[str]) -> int:
    """Run the tests of these files, or of all; return 1 if any has failed."""
    paths = [Path(name) for name in names] or sorted(HERE.glob("test_*.py"))
    paths.sort(key=lambda path: _LONG.index(path.name) if path.name in _LONG else len(_LONG))
    shutil.rmtree(REPORTS, ignore_errors=True)
    begun: list[Future[int]] = []
    with ThreadPoolExecutor(_MOST) as pool:
        for path in paths:
            wait_for_room([each for each in begun if not each.done()])
            begun.append(pool.submit(run, path))
    statuses = [each.result() for each in begun]
    failed = [path.name for path, status in zip(paths, statuses, strict=True) if status]
    print(f"tests/hosts: {len(paths)} files, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
