"""Handles of actors on their way between processes, the methods of an actor's class, and messages
of calls from rank to rank.

Each rank that has an actor listens on a unix socket in its mesh's directory. It first sends a
random challenge; the caller answers with `prove`, for which it needs the mesh's key, and only then
is anything else read. The messages that follow are framed as in `stream`.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import MeshUsageError, did_you_mean
from .codec import Codec
from .messages import Done, Failed
from .ranks import describe_ranks
from .ticket import Ticket
from .values import Chunk, Taken, Unwanted
from .verbs import Pickled, Verb


class NoMethodError(MeshUsageError, AttributeError):
    """Raised if an actor's class has no public method of a name."""


class Address(msgspec.Struct, frozen=True):
    """A handle as it travels: the ranks of an actor; or a mesh, which is the DeviceMesh there.

    Attributes:
        mark: identifies the actor's mesh (`mark_of`).
        mesh: name of the mesh.
        directory: directory of the mesh.
        actor: name of the actor; "" for the mesh.
        kind: name of its class; "" for the mesh.
        ranks: the ranks that the handle names.
    """

    mark: str
    mesh: str
    directory: str
    actor: str
    kind: str
    ranks: tuple[int, ...]

    @classmethod
    def within(
        cls, ticket: Ticket, actor: str = "", kind: str = "", ranks: tuple[int, ...] = ()
    ) -> Address:
        """Return the address of a mesh, or of one of its actors."""
        return cls(mark_of(ticket.key), ticket.name, ticket.directory, actor, kind, ranks)

    def reduce(self) -> Any:
        """Return the pickle reduction of the handle."""
        return open_handle, msgspec.structs.astuple(self)

    def __str__(self) -> str:
        if not self.actor:
            return f"mesh {self.mesh}"
        where = f"{describe_ranks(self.ranks)} of {self.mesh}"
        return f"actor {self.actor}: {self.kind} on {where}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A rank among those of all meshes: its mesh (as in `Address`) and its number."""

    mark: str
    mesh: str
    directory: str
    rank: int

    def __str__(self) -> str:
        return f"{self.mesh} {self.rank}"


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A call from rank to rank.

    Attributes:
        caller: the calling rank.
        run: the caller's number of the call.
        title: actor, method and rank that are called.
        since_s: when the call was made, by `time.monotonic`.
    """

    caller: Peer
    run: int
    title: str
    since_s: float = 0.0


class PeerCall(Verb, frozen=True):
    """Ask a rank to call a method of an actor, as `RunCall` with `of_actor`.

    `link` is this call, and `chain` the calls for which it is made, outermost first. `ranks` are
    the ranks that are called together, and `number` that of all of these calls.
    """

    link: Link
    chain: tuple[Link, ...]
    payload: Pickled
    number: int
    ranks: tuple[int, ...]


class PeerCancel(Verb, frozen=True):
    """Interrupt a call: its caller does not want the answer any more."""

    run: int


class FindActor(Verb, frozen=True):
    """Ask a rank whether it has an actor; answered by `Done` with the dims of its mesh, or by
    `Failed` with the reason.
    """

    run: int
    actor: str


class Chase(Verb, frozen=True):
    """Look for a cycle of waiting ranks: the caller of each call waits for its answer, and the
    called rank has made the next call; the receiver has got the last one.
    """

    links: tuple[Link, ...]


FromPeer = PeerCall | PeerCancel | FindActor | Chase | Done | Failed | Chunk | Taken | Unwanted


CHALLENGE_BYTES = PROOF_BYTES = 32
# Calls from one rank to another that may be in flight.
MAX_CALLS = 10_000


def prove(key: str, challenge: bytes) -> bytes:
    """Return the answer to a rank's challenge, which shows that the caller has its mesh's key."""
    return hmac.digest(key.encode(), b"cellmesh handles" + challenge, "sha256")


def socket_of(directory: str, rank: int) -> str:
    """Return the path on which a rank listens; not longer than the agent's (`Ticket`)."""
    return f"{directory}/{rank}.sock"


def at_rank_from_rank() -> Codec[Any]:
    """Make a rank's decoder of messages from ranks."""
    return Codec(FromPeer, "a rank")


def describe_cycle(links: Sequence[Link]) -> str:
    """Describe, in words, ranks that wait for each other.

    Args:
        links: calls, of which each is for the caller of the next one, and the last one for the
            caller of the first.
    """
    waits = (f"{link.caller} waits for {link.title}" for link in links)
    return f"this call can never end, as {', and '.join(waits)}: let one of them be `async def`"


def closes_last(link: Link, links: Sequence[Link]) -> bool:
    """Return whether a call of a cycle is the one that has closed it."""
    return max(links, key=lambda each: (each.since_s, each.run)) == link


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
    handle. Of a mesh, the mesh itself, or the DeviceMesh of its ranks.
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
        found = open_handle(*msgspec.structs.astuple(self._address))
        if type(found) is not Stray:  # the notebook has attached to its mesh since
            return getattr(found, name)
        raise refuse(self._address, self._why)

    def __getitem__(self, index: object) -> Any:
        raise refuse(self._address, self._why)

    def __len__(self) -> int:
        if not self._address.actor:  # else a mesh would be false, and code take another one
            raise refuse(self._address, self._why)
        return len(self._address.ranks)

    def __reduce__(self) -> Any:
        return self._address.reduce()

    def __repr__(self) -> str:
        return f"<{self._address}, not usable here>"


def refuse(address: Address, why: str = "") -> MeshUsageError:
    """Return the error for the use of a handle in a process that cannot call the actor."""
    here = f"process {os.getpid()} is neither the notebook that made it nor a rank of a mesh"
    why = why or f"cannot be called here: {here}. Call it there, and pass values to this process"
    what = f"{address.actor}, an actor of {address.mesh}," if address.actor else str(address)
    return MeshUsageError(f"{what} {why}")


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
        f"{kind.__name__} has {what}: {name!r} (a handle calls methods; "
        f"mesh.pull('{actor}.{name}') returns attributes){did_you_mean(name, methods_of(kind))}"
    )
