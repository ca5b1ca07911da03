"""Compares the versions that hosts have installed: a mesh needs the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .host import fits, own_python, own_torch, own_version, same_release

# NCCL as torch's wheels depend on it, for each CUDA.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


class Versions(msgspec.Struct, frozen=True):
    """The versions of cellmesh, Python, torch and NCCL that a host has installed.

    Attributes:
        cellmesh, python, torch: their versions; torch's is "" without torch.
        nccl: the version of NCCL's package; "" for none, as where torch has its own.
    """

    cellmesh: str
    python: str
    torch: str
    nccl: str = ""


def own_versions() -> Versions:
    """Return the versions that this process would import, without importing anything."""
    return Versions(own_version(), own_python(), own_torch(), _own_nccl())


def describe_mismatch(by_host: Mapping[str, Versions]) -> str:
    """Describe which hosts have which versions, where these do not fit; "" if they do.

    Args:
        by_host: the versions by the host's name.
    """
    for what, attribute, agree in (
        ("cellmesh", "cellmesh", str.__eq__),
        ("Python", "python", fits),
        ("torch", "torch", same_release),
        ("NCCL", "nccl", str.__eq__),
    ):
        found = {host: getattr(versions, attribute) for host, versions in by_host.items()}
        if what == "NCCL":  # a host without GPUs has none
            found = {host: version for host, version in found.items() if version}
        first = next(iter(found.values()), "")
        if not all(agree(first, version) for version in found.values()):
            listed = ", ".join(f"{host} has {version or 'none'}" for host, version in found.items())
            return f"hosts differ in their {what}: {listed}; install the same version on all"
    return ""


def _own_nccl() -> str:
    import importlib.metadata  # not for meshes on one host

    for name in _NCCL:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
