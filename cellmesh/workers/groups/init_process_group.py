"""Replaces ``init_process_group`` and ``destroy_process_group``, as programs on a rank call them.

A rank has the mesh's default group from the start: a program that asks for the whole mesh finds it.
One that asks for another size or rank gets a default group of its own, and the mesh's groups are
set aside; so they are by ``destroy_process_group``. Set aside, they stay connected and are healed
as ever; they are back when a program asks for the whole mesh again, in the same objects.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _unregister_all_process_groups

from .c10d_registry import Books
from .group_factory import TIMEOUT
from .rendezvous import Call, Rendezvous, read_call

torch_init_process_group = c10d.init_process_group
torch_destroy_process_group = c10d.destroy_process_group
_signature = inspect.signature(torch_init_process_group)
_of_rank: DefaultGroup | None = None
_inherited: list[Any] = []  # what a forked process has of its parent's groups, and may not end


def install() -> None:
    """Replace torch's ``init_process_group`` and ``destroy_process_group`` by those of this
    module; the zygote calls this before it preloads modules.
    """
    for module in (dist, c10d, device_mesh):
        if hasattr(module, "init_process_group"):
            vars(module)["init_process_group"] = init_process_group
    dist.destroy_process_group = c10d.destroy_process_group = destroy_process_group


def init_process_group(*args: Any, **kwargs: Any) -> None:
    owner = _of_this_process()
    if owner is None:
        torch_init_process_group(*args, **kwargs)
    else:
        asked = _signature.bind(*args, **kwargs)
        asked.apply_defaults()
        owner.init(asked.arguments)


def destroy_process_group(group: Any = None) -> None:
    owner = _of_this_process()
    if owner is None:
        torch_destroy_process_group(group)
    else:
        owner.destroy(group)


init_process_group.__doc__ = torch_init_process_group.__doc__
destroy_process_group.__doc__ = torch_destroy_process_group.__doc__


def _of_this_process() -> DefaultGroup | None:
    """Return the rank's `DefaultGroup`; None in a fork, where torch forgets the parent's groups."""
    global _of_rank
    if _of_rank is not None and _of_rank.pid != os.getpid():
        _inherited.append((_of_rank, _of_rank.books.take_out()))
        _unregister_all_process_groups()
        _of_rank = None
    return _of_rank


class DefaultGroup:
    """The default process group of a rank: the mesh's, a program's, or none."""

    def __init__(
        self, books: Books, rendezvous: Rendezvous, backend: str, rank: int, size: int
    ) -> None:
        self.books, self._rendezvous = books, rendezvous
        self._backend, self._rank, self.size = backend, rank, size
        self.pid = os.getpid()
        # Names of the mesh's groups; others end with a ``destroy_process_group``.
        self.own: set[str] = set()
        # Code and line of the frames that destroyed the default group, outermost first.
        self.destroyed_by: Sequence[tuple[types.CodeType, int]] = ()

    def take_over(self) -> None:
        """Make ``init_process_group`` and ``destroy_process_group`` in this process call this
        object, and replace torch's rendezvous handlers.
        """
        global _of_rank
        install()
        self._rendezvous.install()
        _of_rank = self

    @property
    def is_the_meshs(self) -> bool:
        """Whether torch's registries hold the mesh's groups, rather than a program's groups or
        none.
        """
        return self.books.aside is None

    @property
    def program(self) -> str:
        """The name of the program's default group; "" if the mesh's group or none is in use."""
        has_own = not self.is_the_meshs and dist.is_initialized()
        return str(c10d._get_default_group().group_name) if has_own else ""

    def init(self, asked: dict[str, Any]) -> None:
        """Do the work of ``init_process_group``, whose arguments `asked` has by name."""
        call = self._read(asked)
        is_whole = call.size in (None, self.size) and call.rank in (None, self._rank)
        backend = asked["backend"]
        plain = self._backend.replace("cpu:", "").replace("cuda:", "").split(",")
        suits = backend is None or str(backend).lower() in (self._backend, *plain)
        if is_whole and suits:
            self.restore()
            return
        if is_whole and self.is_the_meshs:
            raise ValueError(
                f"the mesh's process group is {self._backend!r}, not {backend!r}: call "
                "dist.destroy_process_group() first, or %dist_stop and start with --backend "
                f"{backend}"
            )
        was_the_meshs = self.is_the_meshs
        if was_the_meshs:
            self.books.set_aside()
        elif dist.is_initialized():
            self.destroy(None)
        try:
            self._init(asked, call)
        except BaseException:
            if was_the_meshs:
                self.restore()
            raise

    def _init(self, asked: dict[str, Any], call: Call) -> None:
        asked = asked | {
            "timeout": asked["timeout"] or TIMEOUT,
            "backend": asked["backend"] or self._backend,
        }
        self._rendezvous.for_group = True
        try:
            if asked["store"] is not None and call.rank is not None and call.size is not None:
                self._rendezvous.session = session = self._rendezvous.meet_over(
                    asked["store"], call.rank, call.size, asked["timeout"]
                )
                asked["store"] = session.store
            torch_init_process_group(**asked)
        except BaseException:
            self._rendezvous.end_session()
            raise
        finally:
            self._rendezvous.for_group = False

    @staticmethod
    def _read(asked: dict[str, Any]) -> Call:
        rank, size = asked["rank"], asked["world_size"]
        if asked["store"] is not None:
            return Call(None, None if rank == -1 else rank, None if size == -1 else size)
        return read_call(asked["init_method"] or "env://", rank, size)

    def destroy(self, group: Any) -> None:
        """Do the work of ``destroy_process_group``."""
        if group in (None, dist.group.WORLD) and dist.is_initialized():
            frames = traceback.walk_stack(sys._getframe(1))
            self.destroyed_by = [(frame.f_code, line) for frame, line in frames][::-1]
        if group is not None and group is not dist.group.WORLD:
            torch_destroy_process_group(group)
        elif not self.is_the_meshs:
            torch_destroy_process_group()
            self.books.register_aside()
            self._rendezvous.end_session()
        elif dist.is_initialized():
            for other in [
                one for one, name in c10d._world.pg_names.items() if name not in self.own
            ]:
                torch_destroy_process_group(other)
            self.books.set_aside()
        else:
            torch_destroy_process_group()  # which says what is wrong

    def restore(self) -> None:
        """Put the mesh's groups back into torch's registries, in place of a program's."""
        if not self.is_the_meshs:
            if dist.is_initialized():
                self.destroy(None)
            self.books.put_back()
