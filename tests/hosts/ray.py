"""A Ray cluster on this machine, whose nodes have runtime directories of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Ray is used in processes of its own: its threads, signal handlers and warnings are not the tests'.
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for directory in sys.argv[2:]:
    cluster.add_node(
        num_cpus=int(sys.argv[1]),
        env_vars={"JUPYTER_RUNTIME_DIR": directory},
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        object_store_memory=80 << 20,
    )
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
_WATCH = """
import os, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print("ready", flush=True)
for line in sys.stdin:
    print("free", ray.available_resources().get("CPU", 0), flush=True)
"""


@dataclass(frozen=True)
class RayCluster:
    """Attributes:
    directories: the runtime directory of each node.
    """

    directories: tuple[Path, ...]
    watch: subprocess.Popen[str]

    def num_free_cpus(self) -> float:
        """Return how many of the cluster's CPUs nobody has reserved."""
        assert self.watch.stdin is not None
        self.watch.stdin.write("\n")
        self.watch.stdin.flush()
        return float(_read(self.watch, "free"))


@contextlib.contextmanager
def ray_cluster(num_nodes: int, num_cpus: int) -> Iterator[RayCluster]:
    """Bring up the cluster; what uses Ray finds it by the environment."""
    with (
        tempfile.TemporaryDirectory(prefix="cmr", dir="/tmp") as root,
        pytest.MonkeyPatch.context() as patch,
    ):
        directories = tuple(Path(root, str(number)) for number in range(num_nodes))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with _python(_CLUSTER, str(num_cpus), *map(str, directories)) as cluster:
            address = _read(cluster, "address")
            patch.setenv("RAY_ADDRESS", address)
            with _python(_WATCH, address) as watch:
                _read(watch, "ready")
                yield RayCluster(directories, watch)


@contextlib.contextmanager
def _python(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _read(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise RuntimeError(f"Ray ended with {process.wait()}")
