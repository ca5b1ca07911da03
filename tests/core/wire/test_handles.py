"""Messages of calls from rank to rank, and what decides on cycles of them."""

from __future__ import annotations

import os
import pickle

import pytest

from cellmesh.errors import MeshUsageError, ProtocolError
from cellmesh.wire import handles
from cellmesh.wire.codec import Parcel, encode
from cellmesh.wire.handles import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    Address,
    Chase,
    Link,
    NoMethodError,
    Peer,
    PeerCall,
    Stray,
    at_rank_from_rank,
    closes_last,
    describe_cycle,
    find_method,
    mark_of,
    prove,
    socket_of,
)
from cellmesh.wire.messages import Stop
from cellmesh.wire.ticket import new_key
from cellmesh.wire.verbs import Pickled

A, B = Peer("a", "left", "/left", 0), Peer("b", "right", "/right", 3)
LINKS = (Link(A, 7, "generator.sample on right 3", 1.0), Link(B, 2, "trainer.step on left 0", 2.0))


def test_a_proof_needs_the_key_and_fits_one_challenge() -> None:
    key, challenge = new_key(), os.urandom(CHALLENGE_BYTES)
    proof = prove(key, challenge)
    assert len(proof) == PROOF_BYTES
    assert proof == prove(key, challenge)
    assert proof not in (prove(new_key(), challenge), prove(key, os.urandom(CHALLENGE_BYTES)))


def test_a_mark_identifies_a_key_and_hides_it() -> None:
    key = new_key()
    assert mark_of(key) == mark_of(key) != mark_of(new_key())
    assert mark_of(key) not in key


def test_a_mesh_that_cannot_be_used_has_no_truth_value_so_no_other_is_taken_for_it() -> None:
    stray = Stray(Address("mark", "scorer", "/d", "", "", ()), "has no process group")
    for use in (bool, len, lambda mesh: mesh.ndim, lambda mesh: mesh["dp"]):
        with pytest.raises(MeshUsageError, match=r"^mesh scorer has no process group$"):
            use(stray)


def test_a_mesh_that_a_function_names_is_found_once_the_notebook_has_attached_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [None, range(3)]
    monkeypatch.setattr(handles, "openers", [lambda _: found[0]])
    trainers = handles.open_handle("mark", "trainer", "/d", "", "", ())
    with pytest.raises(MeshUsageError, match="mesh trainer cannot be called here"):
        trainers.count(1)
    found.pop(0)
    assert trainers.count(1) == 1


def test_messages_of_ranks_are_decoded_and_others_refused() -> None:
    codec = at_rank_from_rank()
    sent = [
        Parcel(PeerCall(LINKS[0], LINKS[1:], Pickled(b"payload", 1), 7, (0, 1)), (b"buffer",)),
        Parcel(Chase(LINKS)),
    ]
    assert codec.decode(encode(sent)) == sent
    for frames in (encode([Parcel(Stop())]), encode(sent[:1])[:1], [b"\x80\x05."]):
        with pytest.raises(ProtocolError):
            codec.decode(frames)


def test_a_cycle_is_closed_by_its_newest_call_and_by_no_other() -> None:
    for links in (LINKS, LINKS[::-1]):
        assert [closes_last(link, links) for link in links] == [link is LINKS[1] for link in links]


def test_a_cycle_is_described_in_the_order_of_its_calls() -> None:
    assert (
        "left 0 waits for generator.sample on right 3, and right 3 waits for trainer.step on left 0"
        in describe_cycle(LINKS)
    )


def test_a_socket_has_a_path_no_longer_than_the_agents() -> None:
    assert len(socket_of("/d", 99_999)) <= len("/d/agent.sock")


def test_a_handle_in_a_plain_process_names_the_reason() -> None:
    stray = pickle.loads(pickle.dumps(Pickles()))
    assert len(stray) == 2
    with pytest.raises(MeshUsageError, match="neither the notebook"):
        stray.step()
    with pytest.raises(MeshUsageError, match="neither the notebook"):
        stray[0]
    assert repr(pickle.loads(pickle.dumps(stray))) == repr(stray)


class Pickles:
    """Pickled as a handle."""

    def step(self) -> None: ...

    def __reduce__(self) -> object:
        return Address("a", "left", "/left", "trainer", "Trainer", (0, 1)).reduce()


def test_the_nearest_method_is_named() -> None:
    assert find_method(Pickles, "it", "step")[1] is Pickles.step
    for name, text in (("stop", "did you mean 'step'"), ("__reduce__", "is private")):
        with pytest.raises(NoMethodError, match=text):
            find_method(Pickles, "it", name)
