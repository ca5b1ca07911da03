"""Base classes of messages and requests, and the struct of a pickled value."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Verb(msgspec.Struct, frozen=True, array_like=True, tag_field="type", tag=True):
    """Base class of all messages between controller, agents and ranks."""


class Pickled(msgspec.Struct, frozen=True, array_like=True):
    """A pickle (protocol 5); its large buffers follow the header as frames of their own.

    `is_mapped`: they are in a segment, which the one frame names (`wire/segments.py`), and the
    stream is the last of them where it is empty here.
    """

    stream: bytes
    num_buffers: int = 0
    is_mapped: bool = False


class WorkVerb(Verb, frozen=True):
    """Base class of messages that give ranks work in a run; class variables say of which kind.

    Class attributes:
        is_cell: it is a notebook's cell.
        is_user_code: it runs code of the user's, whose tracebacks are shown as ranks raise.
        is_query: it takes a moment, makes no rank busy, and answers a failure by its value.
        fills: it may give a rank what a user's namespace holds (`Relay`).
        needs_room: it waits while too much is under way.
    """

    is_cell: ClassVar[bool] = False
    is_user_code: ClassVar[bool] = False
    is_query: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    needs_room: ClassVar[bool] = True


class FeatureRequest(WorkVerb, frozen=True):
    """Base class of the requests that a feature of the controller sends to its handler on a rank;
    see `Request`.
    """
