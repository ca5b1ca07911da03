"""Handles of actors on their way between processes, and the methods of an actor's class."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import MeshUsageError, did_you_mean
from .ranks import describe_ranks


class NoMethodError(MeshUsageError, AttributeError):
    """Raised if an actor's class has no public method of a name."""


class Address(msgspec.Struct, frozen=True):
    """A handle as it travels: the ranks of an actor.

    Attributes:
        mark: identifies the actor's mesh (`mark_of`).
        mesh: name of the mesh.
        directory: directory of the mesh.
        actor: name of the actor.
        kind: name of its class.
        ranks: the ranks that the handle names.
    """

    mark: str
    mesh: str
    directory: str
    actor: str
    kind: str
    ranks: tuple[int, ...]

    def reduce(self) -> Any:
        """Return the pickle reduction of the handle."""
        return open_handle, msgspec.structs.astuple(self)

    def __str__(self) -> str:
        return f"{self.actor}: {self.kind} on {describe_ranks(self.ranks)} of {self.mesh}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A rank among those of all meshes: its mesh (as in `Address`) and its number."""

    mark: str
    mesh: str
    directory: str
    rank: int

    def __str__(self) -> str:
        return f"{self.mesh} {self.rank}"


def mark_of(key: str) -> str:
    """Return a text that identifies a mesh on all its hosts, and is no secret.

    Args:
        key: the mesh's key.
    """
    return hashlib.sha256(key.encode()).hexdigest()[:16]


# Each returns what a handle is in this process; None if it does not know the actor. The process
# adds its own: that of a notebook, or of a rank.
openers: list[Callable[[Address], Any]] = []


def open_handle(*fields: Any) -> Any:
    """Return what a handle is in this process: the object itself, on a rank that has it; else a
    handle.
    """
    address = Address(*fields)
    for opener in openers:
        if (found := opener(address)) is not None:
            return found
    return Stray(address)


class Stray:
    """A handle in a process that is neither the notebook of the actor's mesh nor a rank, as a
    DataLoader's worker is; its use raises an error.

    Args:
        address: the actor.
        why: why it cannot be used; "" for that reason.
    """

    __slots__ = ("_address", "_why")

    def __init__(self, address: Address, why: str = "") -> None:
        self._address, self._why = address, why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks for such by itself
            raise AttributeError(name)
        raise refuse(self._address, self._why)

    def __getitem__(self, index: object) -> Any:
        raise refuse(self._address, self._why)

    def __len__(self) -> int:
        return len(self._address.ranks)

    def __reduce__(self) -> Any:
        return self._address.reduce()

    def __repr__(self) -> str:
        return f"<actor {self._address}, not usable here>"


def refuse(address: Address, why: str = "") -> MeshUsageError:
    """Return the error for the use of a handle in a process that cannot call the actor."""
    here = f"process {os.getpid()} is neither the notebook that made it nor a rank of a mesh"
    why = why or f"cannot be called here: {here}. Call it there, and pass values to this process"
    return MeshUsageError(f"{address.actor}, an actor of {address.mesh}, {why}")


# ---------------------------------------------------------------- classes


def methods_of(kind: type) -> list[str]:
    """Return the names of a class's public methods."""
    return [
        name
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name, None))
    ]


def find_method(kind: type, actor: str, name: str) -> tuple[Any, Any]:
    """Return a public method as its class has it, and its function.

    Args:
        kind: the class.
        actor: name of the actor, for errors.
        name: name of the method.

    Raises:
        NoMethodError: there is none of this name.
    """
    if name.startswith("_"):
        raise NoMethodError(
            f"{kind.__name__}.{name} is private, and a handle calls public methods only"
        )
    found = inspect.getattr_static(kind, name, None)
    if callable(function := getattr(kind, name, None)):
        return found, getattr(found, "__func__", function)
    what = "no method" if found is None else f"no method of that name, but a {type(found).__name__}"
    raise NoMethodError(
        f"{kind.__name__} has {what}: {name!r}{did_you_mean(name, methods_of(kind))}. A handle "
        f"calls methods; mesh.pull('{actor}.{name}') returns attributes"
    )
