"""Messages between front end and the ipywidgets of ranks, and a query for their states."""

from __future__ import annotations

from typing import ClassVar, Literal

from .inspect import Query
from .verb import Verb, WorkVerb

CommKind = Literal["open", "message", "close"]


class FromFrontEnd(WorkVerb, frozen=True):
    """A message from the front end to a comm (a widget) that the rank has opened.

    `content` is JSON, ``{"data", "metadata"}``; the message's binary buffers follow as frames.
    """

    needs_room: ClassVar[bool] = False

    run: int
    comm: str
    kind: CommKind
    content: bytes
    num_buffers: int = 0


class ToFrontEnd(Verb, frozen=True):
    """A message from a comm (a widget) of a rank to the front end; see `FromFrontEnd`.

    `run` made the comm; where `kind` is ``open``, `content` has ``"target_name"`` and
    ``"target_module"``, too.
    """

    run: int
    comm: str
    kind: CommKind
    content: bytes
    num_buffers: int = 0


class WidgetStates(Query, frozen=True):
    """Ask for the states of the rank's ipywidgets. Answer: `workers.comms.describe_widgets`."""


AnyRequest = WidgetStates
