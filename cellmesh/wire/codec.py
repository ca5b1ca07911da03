"""Encodes and decodes cellmesh's messages as lists of ZeroMQ frames.

A ZeroMQ message is one or more *batches*, one after the other. A batch is a header frame, a msgpack
list of verbs, followed by the buffers that the verbs' payloads announce, in order. As each header
says how many buffers follow, batches can be concatenated without being decoded: the agent does so
when it relays.

Decoding validates: a frame that is no list of the expected verbs, or announces more buffers than
there are, raises `ProtocolError`, and nothing has been unpickled by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ..errors import ProtocolError
from .messages import (
    Control,
    FromRank,
    Ranked,
    Relay,
    Request,
    ToAgent,
    ToController,
    ToMainThread,
    Verb,
)

V = TypeVar("V")
Frame = bytes | bytearray | memoryview
# A frame that declares more than this is refused before memory is allocated.
MAX_FRAME_BYTES = 16 << 30

_encoder = msgspec.msgpack.Encoder()


class Parcel(NamedTuple, Generic[V]):
    """A verb (the struct of one message) and the frames that accompany it."""

    verb: V
    buffers: tuple[Frame, ...] = ()


# Like ``Parcel(*...)``, without the Python call of a NamedTuple's constructor, which slows down
# each message.
make_parcel: Callable[[tuple[Any, tuple[Frame, ...]]], Parcel[Any]] = functools.partial(
    tuple.__new__, Parcel
)


def encode(parcels: Iterable[Parcel[Any]]) -> list[Frame]:
    """Encode verbs and their buffers as the frames of one ZeroMQ message.

    Args:
        parcels: verbs with the buffers that belong to them.

    Returns:
        The header frame, then all buffers.
    """
    verbs: list[Verb] = []
    frames: list[Frame] = [b""]
    for verb, buffers in parcels:
        verbs.append(verb)
        frames.extend(buffers)
    try:
        frames[0] = _encoder.encode(verbs)
    except UnicodeEncodeError:  # user code may print lone surrogates
        frames[0] = _encoder.encode([_without_surrogates(verb) for verb in verbs])
    return frames


def _without_surrogates(verb: Any) -> Any:
    if isinstance(verb, Ranked):
        return Ranked(verb.ranks, _without_surrogates(verb.verb))
    texts = {
        field: value.encode(errors="replace").decode()
        for field in verb.__struct_fields__
        if isinstance(value := getattr(verb, field), str)
    }
    return msgspec.structs.replace(verb, **texts)


def num_buffers(verb: Any) -> int:
    """Return the number of frames that follow the header frame with the buffers of this message."""
    if type(verb) is Ranked:
        verb = verb.verb
    if type(verb) is Relay:
        return verb.num_frames
    if type(verb) is Request:
        verb = verb.body
    payload = getattr(verb, "payload", verb)
    return int(getattr(payload, "num_buffers", 0))


class Codec(Generic[V]):
    """Decodes the messages of one direction, as from controllers to an agent.

    Args:
        union: the union of verbs that may be received.
        peer: name of the sender, for error messages.
    """

    def __init__(self, union: Any, peer: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[union])
        self._peer = peer

    def decode(self, frames: Sequence[Frame]) -> list[Parcel[V]]:
        """Decode the frames of a ZeroMQ message into verbs with their buffers.

        Args:
            frames: the frames as received, without routing identity.

        Returns:
            Verbs with their buffers, in order.

        Raises:
            ProtocolError: the message is not valid in this direction.
        """
        parcels: list[Parcel[V]] = []
        at = 0
        while at < len(frames):
            try:
                verbs = self._decoder.decode(frames[at])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                raise ProtocolError(f"{self._peer} sent a header that does not decode: {e}") from e
            at += 1
            for verb in verbs:
                count = num_buffers(verb)
                if count == 0:
                    parcels.append(make_parcel((verb, ())))
                    continue
                if count < 0 or at + count > len(frames):
                    raise ProtocolError(
                        f"{self._peer} announced {count} buffers and sent {len(frames) - at}"
                    )
                parcels.append(Parcel(verb, tuple(frames[at : at + count])))
                at += count
        return parcels


def at_agent_from_controller() -> Codec[ToAgent]:
    """Make an agent's decoder of messages from controllers."""
    return Codec(ToAgent, "a controller")


def at_agent_from_rank() -> Codec[FromRank]:
    """Make an agent's decoder of messages from ranks."""
    return Codec(FromRank, "a rank")


def at_rank_for_work() -> Codec[ToMainThread]:
    """Make a rank's decoder of messages to its main thread."""
    return Codec(ToMainThread, "the controller")


def at_rank_for_control() -> Codec[Control]:
    """Make a rank's decoder of messages to its control thread."""
    return Codec(Control, "the controller")


def at_controller() -> Codec[ToController]:
    """Make a controller's decoder of messages from agents."""
    return Codec(ToController, "the agent")
