"""Who was last in collectives, and how long others waited for it."""

from __future__ import annotations

from cellmesh.controller.trace.profile import Profile
from cellmesh.wire.trace import Collective, RankProfile


def profile_of(*collectives: list[Collective]) -> Profile:
    ranks = {
        rank: RankProfile(start_ns=0, end_ns=1000, collectives=tuple(ours))
        for rank, ours in enumerate(collectives)
    }
    return Profile(ranks)


def waits_of(profile: Profile) -> list[list[int]]:
    return [[one.waited_ns for one in ours] for ours in profile.operations.values()]


def all_reduce(start: int, end: int, ranks: tuple[int, ...] = (), group: str = "0") -> Collective:
    return Collective("all_reduce", start, end - start, ranks, group)


def test_last_rank_to_arrive_is_the_one_waited_for() -> None:
    profile = profile_of(
        [all_reduce(0, 110), all_reduce(200, 205)],
        [all_reduce(100, 112), all_reduce(201, 205)],
        [all_reduce(40, 111), all_reduce(202, 206)],
    )
    lateness = [
        (one.num_last, round(one.awaited_s * 1e9), round(one.waited_s * 1e9))
        for one in profile.lateness.values()
    ]
    assert lateness == [(0, 0, 102), (1, 160, 1), (1, 3, 60)]
    assert waits_of(profile) == [[100, 2], [0, 1], [60, 0]]


def test_collectives_are_matched_within_their_group() -> None:
    profile = profile_of(
        [all_reduce(0, 50, (0, 1), "1")],
        [all_reduce(40, 50, (0, 1), "1")],
        [all_reduce(500, 510, (2, 3), "2")],
        [all_reduce(505, 510, (2, 3), "2")],
    )
    assert waits_of(profile) == [[40], [0], [5], [0]]


def test_missing_rank_of_a_collective_is_named() -> None:
    profile = profile_of([all_reduce(0, 1000)], [], [all_reduce(10, 1000)])
    missing = profile.lateness[1]
    assert (missing.num_missed, missing.num_last) == (1, 0)
    assert waits_of(profile) == [[1000], [], [990]]
    assert profile.describe_lateness() == "rank 1 never began 1 collective that others waited in"


def test_messages_and_unknown_groups_that_some_lack_are_matched_with_nothing() -> None:
    profile = profile_of(
        [Collective("send", 0, 10, (), "0"), Collective("all_reduce", 0, 10)],
        [Collective("recv", 5, 10, (), "0")],
    )
    assert waits_of(profile) == [[0, 0], [0]]
    assert all(one.num_last == one.num_missed == 0 for one in profile.lateness.values())
