"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd. Needs root, slurm-wlm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .netns import run

_START_S = 30.0


@contextlib.contextmanager
def slurm() -> Iterator[Path]:
    """Bring up the cluster; its commands find it by the environment. Yields its directory."""
    root = Path(tempfile.mkdtemp(prefix="cms", dir="/tmp"))
    root.chmod(0o711)
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spooln1", "spooln2", "log", "munge"):
        (root / name).mkdir()
    config = root / "slurm.conf"
    config.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nAuthType=auth/munge\n"
        f"AuthInfo=socket={root}/munge/socket\nCryptoType=crypto/munge\n"
        f"SlurmUser=root\nSlurmdUser=root\nStateSaveLocation={root}/state\n"
        f"SlurmdSpoolDir={root}/spool%n\nSlurmctldPidFile={root}/slurmctld.pid\n"
        f"SlurmdPidFile={root}/slurmd-%n.pid\nSlurmctldLogFile={root}/log/slurmctld\n"
        f"SlurmdLogFile={root}/log/slurmd-%n\nSlurmctldPort=16917\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\nMpiDefault=none\nReturnToService=0\n"
        "SlurmdParameters=config_overrides\nMailProg=/bin/true\nKillWait=1\n"
        f"NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[16918-16919] CPUs=4\n"
        "PartitionName=test Nodes=n[1-2] Default=YES MaxTime=60 State=UP\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        try:
            _start_munge(root / "munge")
            run("/usr/sbin/slurmctld", "-c")
            for node in ("n1", "n2"):
                run("/usr/sbin/slurmd", "-N", node)
            deadline = time.monotonic() + _START_S
            while len(run("sinfo", "-h", "-N", "-t", "idle").splitlines()) < 2:
                if time.monotonic() > deadline:
                    raise RuntimeError(run("sinfo", "-N", "-l"))
            yield root
        finally:
            with contextlib.suppress(RuntimeError):
                run("scancel", "--user=root")
            for path in (*root.glob("slurm*.pid"), root / "munge/pid"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGTERM)
            deadline = time.monotonic() + _START_S
            while _is_up(root) and time.monotonic() < deadline:
                pass
            shutil.rmtree(root, ignore_errors=True)


def _start_munge(directory: Path) -> None:
    (directory / "key").write_bytes(os.urandom(1024))
    for path in (directory, directory / "key"):
        shutil.chown(path, "munge", "munge")
    directory.chmod(0o711)
    (directory / "key").chmod(0o400)
    run(
        *("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "/usr/sbin/munged"),
        *("--force", f"--key-file={directory}/key", f"--socket={directory}/socket"),
        *(f"--pid-file={directory}/pid", f"--log-file={directory}/log"),
        f"--seed-file={directory}/seed",
    )


def _is_up(root: Path) -> bool:
    return bool(subprocess.run(["pgrep", "-f", str(root)], capture_output=True).stdout)
