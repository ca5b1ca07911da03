"""Compares a controller that greets an agent with the agent."""

from __future__ import annotations

from ...wire.attach import Hello
from ...wire.host import fits, own_package, own_python, own_version, same_release
from ...wire.messages import PROTOCOL


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
