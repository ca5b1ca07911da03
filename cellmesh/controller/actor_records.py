"""Keeps a record of each actor in its mesh's directory, for notebooks that attach to the mesh."""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CellmeshError
from ..wire.messages import Pickled
from ..wire.modules import loaded
from ..wire.own_file import from_json, read_own_file, write_whole
from ..wire.payload import dumps, loads

if TYPE_CHECKING:
    from .session.session import Session

# `controller.actors.Spawned`, whose module imports this one.
Spawned = Any
# Longer pickles are not kept: of an actor with such arguments only the class and the ranks are.
_MAX_BYTES = 1 << 18


class Record(msgspec.Struct, frozen=True):
    """What the notebook knows of one actor.

    Attributes:
        number: its place in the order of spawns.
        pids: its ranks, each with the process that has its object; 0 if none has.
        kind: its class, pickled.
        arguments: its positional and keyword arguments and `on_death`, pickled; "" if they cannot
            be kept.
    """

    number: int
    pids: tuple[tuple[int, int], ...]
    kind: str
    arguments: str


def keep(spawned: Spawned) -> None:
    """Write the record of an actor, in place of an earlier one."""
    session = spawned.rank_set.session
    others = [each.number for each in session.actors.values() if each is not spawned]
    spawned.number = spawned.number or max(others, default=0) + 1
    if not (kind := _pack(spawned.kind)):
        return
    pids = _pids(session)
    record = Record(
        spawned.number,
        tuple(
            (rank, 0 if rank in spawned.lost else pids.get(rank, 0))
            for rank in spawned.rank_set.ranks
        ),
        kind,
        _pack((spawned.args, spawned.kwargs, spawned.on_death)),
    )
    with contextlib.suppress(CellmeshError):  # the disk is full: only an attach would need it
        write_whole(_path(session, spawned.name), record, None)


def forget(spawned: Spawned) -> None:
    """Remove the record of an actor."""
    with contextlib.suppress(OSError):
        _path(spawned.rank_set.session, spawned.name).unlink()


def read_all(session: Session) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the attributes (of `Spawned`) and the ranks of each actor of a mesh to which this
    process has attached, in the order of spawns, and remarks on those that cannot be used here.
    """
    found: list[dict[str, Any]] = []
    remarks = []
    pids = _pids(session)
    for path in Path(session.ticket.directory).glob("actor-*.json"):
        name = path.stem.removeprefix("actor-")
        try:
            record = from_json(read_own_file(path), Record)
            kind = _unpack(record.kind)
        except Exception as error:  # a module is missing here
            remarks.append(f"{name} cannot be used here: {type(error).__name__}: {error}")
            continue
        fields: dict[str, Any] = {"args": (), "kwargs": {}, "on_death": "fail"}
        with contextlib.suppress(Exception):
            fields = dict(zip(fields, _unpack(record.arguments), strict=True))
        fields |= {"name": name, "number": record.number, "kind": kind}
        fields["lost"] = {rank for rank, pid in record.pids if pids.get(rank) != pid}
        found.append({**fields, "ranks": [rank for rank, _ in record.pids]})
    return sorted(found, key=lambda each: each["number"]), remarks


def _pids(session: Session) -> Mapping[int, int]:
    return {info.rank: info.pid for info in session.core.mesh.ranks}


def _path(session: Session, name: str) -> Path:
    return Path(session.ticket.directory) / f"actor-{name}.json"


def _pack(value: Any) -> str:
    try:
        pickled, buffers = dumps(value, "the actor", loaded.reducer())
    except CellmeshError:
        return ""
    if len(pickled.stream) + sum(memoryview(each).nbytes for each in buffers) > _MAX_BYTES:
        return ""
    whole = pickle.dumps((pickled.stream, [bytearray(each) for each in buffers]), 5)
    return base64.b64encode(whole).decode()


def _unpack(text: str) -> Any:
    stream, buffers = pickle.loads(base64.b64decode(text))
    return loads(Pickled(stream, len(buffers)), buffers)
