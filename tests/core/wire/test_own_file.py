"""Keys are hidden where values are printed, and peers without one are counted."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cellmesh
from cellmesh.wire.curve import Handshakes, new_keys
from cellmesh.wire.hosts import Invitation
from cellmesh.wire.own_file import Secret, SecretBytes, from_json, to_json

MARKER = "t0p-s3cret"
NAMES = re.compile(r"(.*_)?(key|keys|secret|ticket|env)")
# A public key, a name in a file, a name in a value, a count.
OPEN = {"Host.public_key", "Invitation.public_key", "HostPart.controller_key"}
OPEN |= {"_Said.key", "_Target.key"}


class Keyring(msgspec.Struct):
    name: str
    key: Secret
    invitation: Invitation | None = None


def fields_of(kind: type) -> dict[str, str]:
    """The fields of a struct or dataclass with their annotations; {} of another class."""
    if issubclass(kind, msgspec.Struct):
        names: Any = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        return {}
    known: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        known.update(inspect.get_annotations(each))
    return {name: str(known[name]) for name in names}


def types_with_keys() -> Iterator[tuple[type, str, str]]:
    for module in pkgutil.walk_packages(cellmesh.__path__, "cellmesh."):
        if not module.name.endswith("__main__"):
            for kind in vars(importlib.import_module(module.name)).values():
                if isinstance(kind, type) and kind.__module__ == module.name:
                    for name, annotation in fields_of(kind).items():
                        is_text = annotation.split(" | ")[0] in ("str", "bytes")
                        is_one = (is_text or "env" in name) and NAMES.fullmatch(name)
                        if is_one or "Secret" in annotation:
                            yield kind, name, annotation


def instance_with_marker(kind: type, name: str, annotation: str) -> Any:
    value: Any = Secret(MARKER) if "Secret" in annotation else MARKER
    if annotation.startswith("bytes"):
        value = MARKER.encode()
    values = {**dict.fromkeys(fields_of(kind)), name: value}
    if issubclass(kind, msgspec.Struct):
        return kind(**values)
    made = object.__new__(kind)
    for each in values:
        object.__setattr__(made, each, values[each])
    return made


def test_every_type_with_a_key_hides_it() -> None:
    found = [each for each in types_with_keys() if f"{each[0].__name__}.{each[1]}" not in OPEN]
    names = {f"{kind.__name__}.{name}" for kind, name, _ in found}
    assert {"Ticket.key", "Invitation.secret", "Hello.key", "Inquire.key", "KeyPair.secret"} < names
    shown = [
        f"{kind.__name__}.{name}"
        for kind, name, annotation in found
        if MARKER in repr(instance_with_marker(kind, name, annotation))
    ]
    assert shown == []


def test_secret_is_text_that_no_container_shows() -> None:
    secret = Secret(MARKER)
    assert (secret, f"{secret}", secret.encode()) == (MARKER, MARKER, MARKER.encode())
    content = SecretBytes(secret.encode())
    assert content == MARKER.encode()
    for shown in (secret, content, (secret, "public"), {"key": content}, new_keys()):
        assert MARKER not in repr(shown)
    assert "secret=<secret>" in repr(new_keys())


def test_json_of_a_struct_has_its_keys_and_is_not_shown() -> None:
    invitation = Invitation("m", "tcp://a:1", "p" * 40, Secret(MARKER))
    keyring = Keyring("\udc80", Secret(MARKER), invitation)
    text = to_json(keyring)
    assert text.count(MARKER.encode()) == 2
    assert MARKER not in repr(text)
    again = from_json(text, Keyring)
    assert again == keyring
    assert again.invitation is not None
    assert type(again.key) is type(again.invitation.secret) is Secret


@pytest.mark.parametrize(
    "text",
    [
        b'{"name": "m", "key": "t0p-s3cret',
        b'{"name": 1, "key": "t0p-s3cret"}',
        b'{"name": "m", "key": ["t0p-s3cret"]}',
        b'{"name": "m", "key": "t0p-s3cret\xff"}',
        b"[" * 100_000,
    ],
    ids=["cut", "type", "key", "encoding", "deep"],
)
def test_damaged_text_is_in_no_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expect|codec|recursion|Untermin") as raised:
        from_json(SecretBytes(text), Keyring)
    assert MARKER not in str(raised.value)
    assert raised.value.__context__ is None
    frames = raised.traceback[1:]
    assert all(MARKER not in repr(frame.locals) for frame in frames)


@pytest.mark.parametrize("order", [(15, 16), (16, 15)])
def test_handshakes_that_overlap_are_told_apart_once_one_has_ended(order: tuple[int, int]) -> None:
    """A stranger holds a connection while a controller passes: ZeroMQ does not say which passed."""
    seen = Handshakes()
    seen.accepted(15)
    seen.accepted(16)
    seen.passed()
    for descriptor in order:
        seen.ended(descriptor)
    assert seen.num_refused == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_handshakes_are_counted_right_once_all_connections_have_ended(
    peers: list[tuple[bool, int, int]],
) -> None:
    """In any order of events: each peer is accepted, passes if it may, and ends."""
    events: list[tuple[int, int, str, int]] = []
    for index, (may_pass, begins, lasts) in enumerate(peers):
        events.append((begins, index, "accepted", index))
        if may_pass:
            events.append((begins + lasts, index, "passed", index))
        events.append((begins + lasts, index + 1000, "ended", index))
    seen = Handshakes()
    for _, _, event, descriptor in sorted(events, key=lambda event: event[:2]):
        if event == "passed":
            seen.passed()
        else:
            getattr(seen, event)(descriptor)
    assert seen.num_refused == sum(not may_pass for may_pass, *_ in peers)
