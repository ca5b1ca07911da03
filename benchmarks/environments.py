"""Makes the peers' environments: each peer pins what it likes, and none of it enters ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .contestants import Peer

DEFAULT_FOLDER = Path(__file__).parent / ".envs"

_VERSIONS = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
)


def ensure_environment(peer: Peer, folder: Path) -> Path:
    """Make a peer's environment unless it is there with the versions asked for.

    Args:
        peer: whose.
        folder: where environments are, one folder each.

    Returns:
        Its interpreter.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; it has said why on stderr.
        RuntimeError: pip succeeded and the versions are not those asked for.
    """
    python = folder / peer.name / "bin" / "python"
    if _lacks(python, peer):
        print(f"making the environment of {peer.name}: {' '.join(peer.requirements)}", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / peer.name)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.requirements], check=True)
        lacking = _lacks(python, peer)
        if lacking:
            raise RuntimeError(
                f"{python.parents[1]} has not what was installed: {', '.join(lacking)}"
            )
    return python


def _lacks(python: Path, peer: Peer) -> list[str]:
    """The requirements that an environment does not meet."""
    if not python.exists():
        return list(peer.requirements)
    output = subprocess.run([python, "-c", _VERSIONS], check=True, stdout=subprocess.PIPE).stdout
    versions: dict[str, str] = json.loads(output)
    lacking = []
    for requirement in peer.requirements:
        name, _, wanted = requirement.partition("==")
        present = versions.get(name, "").partition("+")[0]
        if not present or (wanted and present != wanted):
            lacking.append(requirement)
    return lacking
