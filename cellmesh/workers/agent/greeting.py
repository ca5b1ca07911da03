"""Compares a controller that greets an agent with the agent, and says why it is refused."""

from __future__ import annotations

import collections

from ...wire.attach import Hello
from ...wire.host import fits, format_span, own_package, own_python, own_version, same_release
from ...wire.messages import PROTOCOL

# Of so many controllers that were sent away, an agent knows why.
_MAX_DISMISSED = 100


class Dismissals:
    """The controllers that an agent has sent away, which may come back and ask why."""

    def __init__(self) -> None:
        self._why: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def note(self, link: bytes, reason: str) -> None:
        """Note why the controller with this link was sent away; the oldest is forgotten."""
        self._why[link] = reason
        if len(self._why) > _MAX_DISMISSED:
            self._why.popitem(last=False)

    def why(self, link: bytes) -> str:
        """Return why the controller with this link was sent away; "" if it was not."""
        return self._why.get(link, "")


def find_mismatch(hello: Hello, torch: str, is_local: bool) -> str:
    """Return why a controller and this agent do not understand each other; "" if they do.

    Args:
        hello: the controller's greeting.
        torch: the version that the mesh runs.
        is_local: both are on one host, and must have imported cellmesh from one place.
    """
    version, python = own_version(), own_python()
    if hello.protocol != PROTOCOL:
        return f"the mesh speaks protocol {PROTOCOL}, this controller {hello.protocol}"
    if hello.version != version:
        return f"the mesh runs cellmesh {version}, and this is {hello.version}"
    if not fits(hello.python, python):
        return f"the mesh runs Python {python}, and this is {hello.python}"
    if hello.package != own_package() and is_local:
        return (
            f"the mesh runs cellmesh {version} of {own_package()}, and this is "
            f"{hello.version} of {hello.package}: use the environment that started it"
        )
    if not same_release(hello.torch, torch):
        return f"the mesh runs torch {torch}, and this is {hello.torch}"
    return ""


def describe_hold(pid: int, host: str, held_s: float) -> str:
    """Say which process holds the mesh, and what to do to have it.

    Args:
        pid: the controller's.
        host: the controller's; "" if it is the agent's, too.
        held_s: for how long it has held the mesh.
    """
    where = f" ({host})" if host else ""
    return (
        f"the mesh is held by process {pid}{where}, which attached {format_span(held_s)} ago: "
        "detach it there (`%dist_detach`), or take it over with `--steal`"
    )
