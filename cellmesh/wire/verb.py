"""Base classes of messages and requests, and the struct of a pickled value."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Verb(msgspec.Struct, frozen=True, array_like=True, tag_field="type", tag=True):
    """Base class of all messages between controller, agents and ranks."""


class Pickled(msgspec.Struct, frozen=True, array_like=True):
    """A pickle (protocol 5), whose large buffers follow the header as separate frames.

    `is_mapped`: the buffers are in a segment, which the only frame names (`wire/segments.py`); if
    `stream` is empty, the last buffer is the stream.
    """

    stream: bytes
    num_buffers: int = 0
    is_mapped: bool = False


class WorkVerb(Verb, frozen=True):
    """Base class of messages that give ranks work in a run; class variables describe the kind of
    work.

    Class attributes:
        is_cell: whether it is a notebook's cell.
        is_user_code: whether it runs user code, whose tracebacks are shown as ranks raise.
        is_query: whether it is short, does not make a rank busy, and answers a failure by its
            value.
        fills: whether it may bind names in a rank's namespace (`Relay`).
        needs_room: whether it waits while too many runs or bytes are in flight.
    """

    is_cell: ClassVar[bool] = False
    is_user_code: ClassVar[bool] = False
    is_query: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    needs_room: ClassVar[bool] = True


class FeatureRequest(WorkVerb, frozen=True):
    """Base class of the requests that a feature of the controller sends to its handler on a rank
    (see `Request`).
    """
