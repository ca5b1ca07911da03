"""What a restart takes of the notebook's environment and working directory."""

from __future__ import annotations

from cellmesh.controller.session.surroundings import OwnSurroundings, describe_changes, fixed_names
from cellmesh.wire.environment import Surroundings

from ....support.tickets import address, make_ticket

BEFORE = OwnSurroundings({b"A": b"1", b"B": b"1", b"GIVEN": b"1", b"OWN": b"1"}, b"/old")


def taken(now: OwnSurroundings, **options: object) -> tuple[Surroundings, str]:
    ticket = make_ticket(cwd="/old", env={"GIVEN": "1", "OWN": "other"}, **options)
    changes = BEFORE.changes(now, ticket, fixed_names(ticket, BEFORE.environment))
    return changes, describe_changes(changes)


def test_what_is_new_changed_and_removed_is_taken_and_named_without_values() -> None:
    now = OwnSurroundings({b"A": b"2", b"C": b"secret", b"GIVEN": b"2", b"OWN": b"3"}, b"/new")
    changes, text = taken(now)
    assert changes.environment == {b"A": b"2", b"B": None, b"C": b"secret", b"GIVEN": b"2"}
    assert changes.cwd == b"/new"
    assert text == (
        "the new ranks take from this notebook: A, B, C, GIVEN, the working directory /new. A "
        "variable that is read while torch is imported needs `%dist_start --fresh`"
    )
    assert "secret" not in repr(changes)


def test_what_the_mesh_sets_itself_stays_and_a_removed_directory_is_no_change() -> None:
    assert taken(BEFORE) == (Surroundings(), "")
    own = {b"RANK": b"7", b"CUDA_VISIBLE_DEVICES": b"3", b"OPENBLAS_NUM_THREADS": b"9"}
    now = OwnSurroundings({**BEFORE.environment, **own}, b"")
    assert taken(now) == (Surroundings(), "")


def test_ranks_on_other_hosts_take_passed_variables_only() -> None:
    now = OwnSurroundings({b"A": b"2", b"GIVEN": b"2"}, b"/new")
    found, _ = taken(now, agents=(address("a"),), curve_secret="s")
    assert found == Surroundings({b"GIVEN": b"2"})


def test_odd_names_are_no_control_characters() -> None:
    odd = {b"X\x1b[2J": b"1", b"Y\xff": b""}
    _, text = taken(OwnSurroundings({**BEFORE.environment, **odd}, b"/old"))
    assert "X\\x1b[2J" in text
    text.encode()
