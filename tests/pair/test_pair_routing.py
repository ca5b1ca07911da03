"""Both sides of two meshes in memory: messages between their ranks by way of the controller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller.core.core import Change, Deliver, Effect
from cellmesh.controller.routing import Router
from cellmesh.wire.codec import Parcel, at_rank_for_control, encode
from cellmesh.wire.handles import mark_of
from cellmesh.wire.peer_calls import Routed
from cellmesh.workers.agent.agent import end_routes, return_unrouted
from cellmesh.workers.agent.supervisor import Fork, Up

from ..support.scripted import Frames, ScriptedRank, World

Got = tuple[str, int, str | tuple[bytes, ...]]  # sender, and the message or why it is lost


class RoutedRank(ScriptedRank):
    """A rank that keeps its messages."""

    def __init__(self, rank: int, pid: int, say: Callable[[Frames], None]) -> None:
        super().__init__(rank, pid, say)
        self.got: list[Got] = []

    def hear_control(self, frames: Frames) -> None:
        for verb, buffers in at_rank_for_control().decode(frames):
            if type(verb) is Routed:
                message = tuple(map(bytes, buffers))
                self.got.append((verb.mark, verb.rank, verb.why_lost or message))
        super().hear_control(frames)


class Mesh(World):
    """A mesh that sends and receives messages.

    Args:
        name: its name, also its key.
        num_ranks: number of its ranks.
        router: passes its messages on.
    """

    def __init__(self, name: str, num_ranks: int, router: Router) -> None:
        super().__init__(num_ranks)
        self.mark, self._router = mark_of(name), router
        self.mesh: Any = SimpleNamespace(
            name=name,
            ticket=SimpleNamespace(key=name),
            num_ranks=num_ranks,
            core=self.core,
            runs=SimpleNamespace(post_if_open=self._post),
        )
        router.add(self.mesh)

    def _post(self, command: Any) -> None:
        self.carry_out(command(self.core, self.now))
        self.deliver()

    def send(self, rank: int, mark: str, to: int, *frames: bytes) -> None:
        """A rank sends a message to another one."""
        self.hear_rank(rank, encode([Parcel(Routed(mark, to, len(frames)), frames)]))
        self.deliver()

    def take(self, rank: int) -> list[Got]:
        """Return what a rank has got since."""
        process = self.ranks[rank]
        assert isinstance(process, RoutedRank)
        got, process.got = process.got, []
        return got

    def carry_out(self, effects: Sequence[Effect]) -> None:
        super().carry_out(effects)
        for effect in effects:
            if isinstance(effect, Deliver) and type(effect.parcel.verb) is Routed:
                self._router.carry(self.mesh, effect.ranks[0], effect.parcel)
            elif isinstance(effect, Change):
                self._router.note(self.mesh, effect)

    def act(self, actions: Sequence[Any]) -> None:
        super().act(actions)
        for action in actions:
            if isinstance(action, Up) and not self.is_attached:
                super().act([*return_unrouted(action.parcels)])

    def _new_rank(self, order: Fork, rank: int, pid: int) -> ScriptedRank:
        return RoutedRank(rank, pid, functools.partial(self.hear_rank, rank))


@pytest.fixture
def meshes() -> tuple[Mesh, Mesh]:
    """Two meshes of one process."""
    router = Router()
    return Mesh("left", 2, router).start(), Mesh("right", 1, router).start()


def test_a_message_arrives_with_its_sender_and_is_not_delayed(meshes: tuple[Mesh, Mesh]) -> None:
    left, right = meshes
    now = left.now
    left.send(1, right.mark, 0, b"call", b"buffer")
    assert right.take(0) == [(left.mark, 1, (b"call", b"buffer"))]
    right.send(0, left.mark, 1, b"answer")
    assert left.take(1) == [(right.mark, 0, (b"answer",))]
    left.send(0, left.mark, 1, b"within a mesh")
    assert left.take(1) == [(left.mark, 0, (b"within a mesh",))]
    assert not left.take(0)
    assert left.now == now


def test_a_message_arrives_while_the_receiver_works(meshes: tuple[Mesh, Mesh]) -> None:
    left, right = meshes
    work = right.running()
    left.send(0, right.mark, 0, b"call")
    assert right.take(0)
    right.done(0)
    assert work.done()


def test_a_message_that_cannot_be_passed_on_comes_back_with_the_reason(
    meshes: tuple[Mesh, Mesh],
) -> None:
    left, right = meshes
    left.send(0, "of another notebook", 0, b"call")
    why = "cannot be called: its mesh has ended, or this rank's notebook does not have it"
    assert left.take(0) == [("of another notebook", 0, why)]
    left.send(0, right.mark, 5, b"call")
    assert left.take(0) == [(right.mark, 5, "of right was removed by a resize")]
    left.reap(1)
    left.wait(0.1)
    right.send(0, left.mark, 1, b"call")
    assert right.take(0) == [(left.mark, 1, "of left killed by SIGKILL")]
    left.restart()
    right.send(0, left.mark, 0, b"call")
    got = right.take(0)[-1]
    assert got == (left.mark, 0, "of left cannot be called: the mesh is restarting")


def test_the_others_hear_of_a_death_once_and_only_those_with_messages(
    meshes: tuple[Mesh, Mesh],
) -> None:
    left, right = meshes
    left.send(1, right.mark, 0, b"call")
    right.take(0)
    left.reap(0)
    left.wait(0.1)
    assert right.take(0) == []
    left.reap(1)
    left.wait(0.1)
    assert right.take(0) == [(left.mark, 1, "of left killed by SIGKILL")]
    left.restart()
    assert right.take(0) == []


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (Mesh.restart, "of left was restarted"),
        (Mesh.lose_agent, "of left cannot be reached: its mesh has ended, or its notebook left it"),
    ],
)
def test_the_others_hear_of_a_restart_and_of_the_end(
    meshes: tuple[Mesh, Mesh], act: Callable[[Mesh], None], why: str
) -> None:
    left, right = meshes
    right.send(0, left.mark, 1, b"call")
    act(left)
    assert right.take(0) == [(left.mark, 1, why)]


def test_the_others_hear_of_ranks_that_a_resize_removes(meshes: tuple[Mesh, Mesh]) -> None:
    left, right = meshes
    for rank in (0, 1):
        right.send(0, left.mark, rank, b"call")
    left._router.note_resized(left.mesh, 1)
    assert right.take(0) == [(left.mark, 1, "of left was removed by a resize")]


def test_without_a_controller_ranks_hear_so_at_once_and_no_message_is_kept(
    meshes: tuple[Mesh, Mesh],
) -> None:
    left, right = meshes
    left.send(0, right.mark, 0, b"call")
    left.leave()
    left.act([end_routes((0, 1))])
    for rank in (0, 1):
        ((mark, _, why),) = left.take(rank)
        assert mark == ""
        assert "no notebook is attached" in str(why)
    left.hear_rank(1, encode([Parcel(Routed(right.mark, 0, 1), (b"call",))]))
    ((mark, rank, why),) = left.take(1)
    assert (mark, rank) == (right.mark, 0)
    assert "no notebook is attached" in str(why)
    assert not left.spool
