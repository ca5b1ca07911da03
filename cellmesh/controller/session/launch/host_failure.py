"""Explains why the command that should start an agent on a host failed, and what to type next.
Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRY = "`ssh {name} true` must work without a question"
# What ssh, a shell or Python on the host have said -> what it means, and what mends it.
_KNOWN = (
    (
        r"Could not resolve|Name or service not known|Temporary failure in name resolution",
        "the name does not resolve",
        f"write it as DNS, /etc/hosts or ~/.ssh/config have it; {_TRY}",
    ),
    (
        r"Host key verification failed",
        "the host's key is not known, or another one than before",
        "connect by hand once (`ssh {name}`) and compare the key",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "the host refuses your key",
        f"`ssh-copy-id {{name}}`, or load the key with `ssh-add`; {_TRY}",
    ),
    (
        r"Connection refused",
        "nothing listens on the host's ssh port",
        f"start sshd there, or name the port in ~/.ssh/config; {_TRY}",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "the host is not reached",
        f"see that it runs, and that no firewall is between; {_TRY}",
    ),
    (
        r"No module named '?cellmesh\b",
        "its Python has no cellmesh",
        "is cellmesh installed on {name}? There: `{python} -m pip install cellmesh`",
    ),
    (
        r"No module named '?(\w+)",
        "its Python lacks a package",
        "on {name}: `{python} -m pip install {found}`",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "its disk is full",
        "free some space on {name}; `df -h` there says where",
    ),
)


@dataclass(frozen=True)
class HostFailure:
    """Why no agent runs on a host.

    Attributes:
        text: what is wrong.
        remedy: what to type next.
        said: what the command has printed.
    """

    text: str
    remedy: str
    said: str

    def describe(self, name: str) -> str:
        """Return one sentence with all of it."""
        said = f": {self.said}" if self.said else ""
        return f"{name}: {self.text}{said}. Next: {self.remedy}"


def explain(name: str, program: str, python: str, status: int, said: str) -> HostFailure:
    """Explain the end of a command that should start an agent.

    Args:
        name: the host.
        program: the first word of the command.
        python: the interpreter that the command names.
        status: the command's exit code.
        said: what it has printed.
    """
    ended = f"no agent was started, {program} exited with {status}"
    for pattern, text, remedy in _KNOWN:
        found = re.search(pattern, said)
        if found is not None:
            package = found[1] if found.lastindex else ""
            mend = remedy.format(name=name, python=python, found=package)
            return HostFailure(f"{text} ({ended})", mend, said)
    if status == 127 or python in said:
        mend = f"is cellmesh installed on {name}? There must be a {python}, as in the notebook"
        return HostFailure(f"the notebook's Python is not there ({ended})", mend, said)
    return HostFailure(ended, f"try the command by hand: `{program}` to {name}", said)
