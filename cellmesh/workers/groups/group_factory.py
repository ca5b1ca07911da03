"""Lets torch make process groups in an interruptible way, and records their connections."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ...errors import GroupDown
from . import abort, descriptors
from .blueprint import GroupPlan
from .interruptible_wait import Patience
from .store import MeshStore

# A cell may take as long as it takes: torch's own time-out (30 min) would take the group away from
# a user who sits in a debugger. What hangs is shown and interrupted, not timed out.
TIMEOUT = timedelta(days=365)

# The arguments of ``_new_process_group_helper`` by name, and what it returns with the connections
# it made.
Asked = dict[str, Any]
Made = tuple[Any, Any, dict[int, int]]


class Maker:
    """Calls torch's ``_new_process_group_helper``.

    Args:
        store: the mesh's; connected before, so that its connection is not taken for the group's.
        patience: waits for gloo.
    """

    def __init__(self, store: MeshStore, patience: Patience) -> None:
        self._store, self._patience = store, patience
        self._helper: Callable[..., Any] = c10d._new_process_group_helper
        self._sockets_before: dict[int, int] | None = None

    def intercept(self, new_group: Callable[[Asked], Any]) -> None:
        """Redirect torch's ``_new_process_group_helper`` in this process to `new_group`."""
        signature, pid = inspect.signature(self._helper), os.getpid()

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != pid:  # in a process that user code has forked
                return self._helper(*args, **kwargs)
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            return new_group(call.arguments)

        c10d._new_process_group_helper = make_watched

    def make(self, asked: Asked, limit_s: float | None = None) -> Made:
        """Let torch make a group.

        Args:
            asked: the helper's arguments.
            limit_s: how long its members may take to connect; None for as long as it takes.

        Returns:
            The group or ``NON_GROUP_MEMBER``, its store, and its connections.
        """
        # The time-out that gloo connects with is that of its messages, too, for good.
        arguments = asked | {"timeout": _timeout_for(asked)}
        self._store.connect()
        is_member = asked["group_rank"] is not None
        if is_member and (lack := descriptors.find_lack([asked["group_size"]])):
            raise GroupDown(
                f"the process group {str(asked['group_name'])!r} cannot be connected: {lack}"
            )
        self._sockets_before = before = abort.open_sockets()
        try:
            with self._patient_gloo(limit_s):
                made, store = self._helper(**arguments)
            return made, store, abort.connections(abort.new_sockets(before))
        except BaseException:
            abort.shut_down(abort.new_sockets(before))
            raise
        finally:
            self._sockets_before = None

    def cut(self) -> None:
        """Shut down the connections of a group that is being made now, from any thread."""
        before = self._sockets_before
        if before is not None:
            with contextlib.suppress(OSError):  # no descriptor is left to list them
                abort.shut_down(abort.new_sockets(before))

    @contextlib.contextmanager
    def _patient_gloo(self, limit_s: float | None) -> Iterator[None]:
        """Let torch's helper connect gloo's groups in another thread, while the main thread can be
        interrupted.
        """
        patience = self._patience

        class PatientGloo(ProcessGroupGloo):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                patience.run(lambda: ProcessGroupGloo.__init__(self, *args, **kwargs), limit_s)

        c10d.ProcessGroupGloo = PatientGloo  # type: ignore[misc]
        try:
            yield
        finally:
            c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


def _timeout_for(asked: Asked) -> timedelta:
    """The time-out that the user has chosen; torch's default counts as no choice."""
    timeout: timedelta | None = asked["timeout"]
    if asked["backend_options"] is not None and timeout is not None:
        return timeout  # torch compares it with that of the options
    by_default = timeout is None or timeout in (default_pg_timeout, default_pg_nccl_timeout)
    return TIMEOUT if by_default or timeout is None else timeout


def plan_of(asked: Asked, ranks: tuple[int, ...]) -> GroupPlan:
    """The plan of a group from a call of ``_new_process_group_helper``, to make the group on a new
    rank.

    Args:
        asked: its arguments by name.
        ranks: the mesh's ranks of the members; () for the mesh's default group.
    """
    device = asked["device_id"]
    return GroupPlan(
        str(asked["group_name"]),
        ranks,
        str(asked["backend"]),
        asked["pg_tag"] or "",
        asked["group_desc"] or "undefined",
        _timeout_for(asked).total_seconds(),
        str(device) if device is not None else "",
    )


def call_for(plan: GroupPlan, rank: int, store: Any) -> Asked:
    """The arguments of ``_new_process_group_helper`` that make a group of a plan.

    Args:
        plan: what was written down, of a group with ranks of its own.
        rank: who calls.
        store: the default group's.
    """
    return {
        "group_size": len(plan.ranks),
        "group_rank": plan.ranks.index(rank) if rank in plan.ranks else None,
        "global_ranks_in_group": list(plan.ranks),
        "backend": plan.backend,
        "store": store,
        "group_name": plan.name,
        "backend_options": None,
        "timeout": timedelta(seconds=plan.timeout_s),
        "pg_tag": plan.tag,
        "device_id": torch.device(plan.device) if plan.device else None,
        "group_desc": plan.description,
    }


def call_of_split(group: Any, ranks: Sequence[int]) -> Asked:
    """The arguments of ``_new_process_group_helper`` for a group that NCCL has split off
    another.
    """
    default = c10d._get_default_group()
    return {
        "group_size": group.size(),
        "group_rank": group.rank(),
        "global_ranks_in_group": list(ranks),
        "backend": c10d._world.pg_map[default][0],
        "store": None,
        "group_name": group.group_name,
        "backend_options": None,
        "timeout": TIMEOUT,
        "pg_tag": None,
        "device_id": default.bound_device_id,
        "group_desc": group.group_desc,
    }


def timeouts_of(group: Any) -> dict[str, timedelta]:
    """The time-outs of a plain group's backends, which users may have changed, by backend."""
    return {
        backend.name(): backend.options._timeout
        for backend in abort.backends_of(group)
        if hasattr(getattr(backend, "options", None), "_timeout")
    }


def set_timeouts(group: Any, timeouts: dict[str, timedelta]) -> None:
    """Give a plain group's backends the time-outs that `timeouts_of` has read."""
    for backend in abort.backends_of(group):
        if backend.name() in timeouts:
            backend._set_default_timeout(timeouts[backend.name()])
