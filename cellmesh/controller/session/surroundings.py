"""Environment variables and working directory that a restart passes from the notebook to new ranks,
as far as they have changed since the last start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

import msgspec

from ...wire.environment import SET_BY_MESH, VISIBLE, Surroundings
from ...wire.ticket import Ticket


class OwnSurroundings(msgspec.Struct, frozen=True):
    """Environment and working directory of this process at one moment; `cwd` is empty if the
    directory has been removed.
    """

    environment: Mapping[bytes, bytes]
    cwd: bytes

    @classmethod
    def now(cls) -> OwnSurroundings:
        """Return the present environment and working directory of this process."""
        cwd = b""
        with contextlib.suppress(OSError):
            cwd = os.getcwdb()
        return cls(dict(os.environb), cwd)

    def changes(
        self, now: OwnSurroundings, ticket: Ticket, fixed: Collection[bytes]
    ) -> Surroundings:
        """Return the changes of environment and working directory since this moment, as far as new
        ranks take them over.

        Ranks on other hosts take over variables of ``--env`` only, and no directory.

        Args:
            now: the present environment and working directory.
            ticket: ticket of the mesh.
            fixed: variables for which the mesh has values of its own (`fixed_names`).
        """
        given = {os.fsencode(name) for name in ticket.env}
        before, after = self.environment, now.environment
        changed = {
            name: after.get(name)
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name) and name not in fixed
            if name in given or not ticket.spans_hosts
        }
        moved = now.cwd if now.cwd != self.cwd and not ticket.spans_hosts else b""
        return Surroundings(changed, moved)


def describe_changes(changes: Surroundings) -> str:
    """Return a sentence on the changes of environment and directory that new ranks take over; ""
    without any.

    It has names but no values, which may be secret.
    """
    names = [ascii(os.fsdecode(name))[1:-1] for name in changes.environment]
    if changes.cwd:
        names.append(f"the working directory {ascii(os.fsdecode(changes.cwd))[1:-1]}")
    if not names:
        return ""
    text = f"the new ranks take from this notebook: {', '.join(names)}"
    if changes.environment:
        text += ". A variable that is read while torch is imported needs `%dist_start --fresh`"
    return text


def fixed_names(ticket: Ticket, environment: Mapping[bytes, bytes]) -> frozenset[bytes]:
    """Return the environment variables whose values new ranks never take over from this process.

    They are the mesh's own, the list of visible GPUs (which are counted at a start), and variables
    for which ``--env`` has given another value than the one here.
    """
    given = {os.fsencode(name): os.fsencode(value) for name, value in ticket.env.items()}
    own = {os.fsencode(name) for name in (*SET_BY_MESH, VISIBLE)}
    return frozenset(own | {n for n, value in given.items() if environment.get(n) != value})
