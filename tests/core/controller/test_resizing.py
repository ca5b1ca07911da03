"""How many ranks a mesh gets, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellmesh.controller import resizing as module
from cellmesh.controller.code_files.sync import CodeSync
from cellmesh.controller.core.core import Core
from cellmesh.controller.core.effects import HealReport
from cellmesh.controller.news import Reply
from cellmesh.controller.resizing import Question, Resizing, plan_resize, resize
from cellmesh.controller.session.hosts.connections import Connections
from cellmesh.controller.session.launch.hosts import HostAgents
from cellmesh.errors import HostError, MeshUsageError, NoMeshError
from cellmesh.wire.hosts import Host
from cellmesh.wire.peer_calls import PEER_RUNS
from cellmesh.wire.status import RankState, WaitingCall
from tests.core.controller.session.test_session import TICKET

HERE = {"layout": (4,), "names": (), "dims": {"dp": 4}}
HOSTS = {"layout": (2, 2), "names": ("a", "b"), "dims": {"dp": 2, "tp": 2}}
C = Host("c", num_ranks=2)


def plan(num_ranks: Any = None, hosts: Any = (), mesh: Any = None, **now: Any) -> Resizing:
    return plan_resize(num_ranks, hosts, mesh, **now)


def test_mesh_on_one_host_grows_and_shrinks_along_its_only_dim() -> None:
    assert plan(6, **HERE) == Resizing((6,), (), {"dp": 6})
    assert plan(1, **HERE) == Resizing((1,), (), {"dp": 1})
    assert plan(mesh="a=2,b=4", **HERE) == Resizing((8,), (), {"a": 2, "b": 4})


def test_highest_ranks_end_and_the_last_host_gets_more() -> None:
    assert plan(2, mesh="dp=1,tp=2", **HOSTS).layout == (2,)
    assert plan(6, mesh="dp=3,tp=2", **HOSTS).layout == (2, 4)


@pytest.mark.parametrize("options", [(6, "c:2"), (None, "c:2"), (6, ["c"])])
def test_hosts_join_with_the_ranks_that_are_new(options: tuple[Any, Any]) -> None:
    assert plan(*options, "dp=3,tp=2", **HOSTS) == Resizing((2, 2, 2), (C,), {"dp": 3, "tp": 2})


@pytest.mark.parametrize(
    ("options", "now", "message"),
    [
        ((0,), HERE, "must be 1 to"),
        ((2.0,), HERE, "whole number"),
        ((), HERE, r"say how many.*dist_resize 8`"),
        ((4,), HERE, "has 4 ranks: `%dist_mesh`"),
        ((6, "c:2"), HERE, "on this machine alone"),
        ((6, (), "dp=2,tp=2"), HERE, "makes 4 ranks"),
        ((6,), HOSTS, r"--mesh dp=3,tp=2`"),
        ((6, "b:2", "dp=6"), HOSTS, "b has ranks of the mesh"),
        ((8, "c:2", "dp=8"), HOSTS, "c.*2|4"),
        ((3, "c:2", "dp=3"), HOSTS, "."),
    ],
)
def test_size_that_cannot_be_is_refused(options: Any, now: Any, message: str) -> None:
    with pytest.raises(MeshUsageError, match=message):
        plan(*options, **now)


NEW = Host("b", "tcp://10.0.0.2:5", "key", 1, 1)
PLAN = Resizing((1, 1), (Host("b", num_ranks=1),), {"dp": 2})


class World:
    """A mesh of one host, which writes down what is done; any step may fail, or end the mesh."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.has_ended = False
        self.why_not = ""
        self.mesh, self.states = SimpleNamespace(num_ranks=1), dict[int, RankState]()
        self.launcher = object.__new__(HostAgents)
        self.launcher.ticket = TICKET
        self.launcher.start_more = lambda layout, entries: self.step("start", [NEW])  # type: ignore

    def step(self, name: str, result: Any = None) -> Any:
        self.done.append(name)
        if name in self.faults:
            raise self.faults[name]
        return result

    def post(self, command: Callable[[Core, float], Any]) -> None:
        if self.has_ended:
            raise NoMeshError("the mesh has ended")
        command(cast(Core, self), 0.0)

    def ask(self, question: Question) -> Reply[Any]:
        reply: Reply[Any] = Reply()
        self.step("ask")
        if self.has_ended:
            reply.give(None)
            return reply
        try:
            _, ((answer),) = question(cast(Core, self), 0.0)
            reply.give(answer)
        except Exception as error:
            reply.fail(error)
        return reply

    def why_not_resize(self, size: int) -> str:
        return self.why_not

    def resize(self, layout: Any, dims: Any, now: float) -> tuple[int, Sequence[Any]]:
        return 1, [self.step("resize", HealReport())]

    def invite(self, agents: Sequence[Host]) -> None:
        self.step("invite")

    def check_invited(self) -> None:
        self.step("check")

    def turn_away(self) -> None:
        self.step("turn away")

    def forget(self) -> None:
        pass

    def bring(self, timeout_s: float) -> None:
        self.step("bring")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    def end_agents(ticket: Any, timeout_s: float) -> list[Host]:
        return world.step("end " + ", ".join(agent.name for agent in ticket.agents), [])  # type: ignore

    monkeypatch.setattr(module, "end_agents", end_agents)
    return world


def do(world: World, plan: Resizing = PLAN) -> HealReport:
    parts = cast(Core, world), world.ask, world.post, world.launcher, cast(Connections, world)
    note = lambda plan, new: world.step("note")  # noqa: E731
    return resize(plan, *parts, note, cast(CodeSync, world), lambda ranks: world.states)


ENDED = ["turn away", "end b"]


def test_new_host_has_the_modules_before_the_core_is_asked(world: World) -> None:
    assert not do(world).failure
    assert world.done == ["start", "invite", "bring", "ask", "check", "note", "resize"]
    # A run begins in the meantime.
    world.bring = lambda timeout_s: setattr(world, "why_not", "rank 0 runs cell 3")  # type: ignore
    with pytest.raises(MeshUsageError, match="rank 0 runs cell 3\nb did not join"):
        do(world)
    assert world.done[-2:] == ENDED


def test_calls_of_other_ranks_that_a_resize_would_end_are_named(world: World) -> None:
    world.mesh.num_ranks = 4
    calls = [WaitingCall(run, f"gen.sample{run % 2}") for run in (7, PEER_RUNS[0], PEER_RUNS[1])]
    for rank, waiting in ((2, calls[:1]), (3, calls)):
        world.states[rank] = RankState(1, -1, 0, 0, "", "", "cpu", 0, waiting=tuple(waiting))
    names = r"\(gen.sample0 on rank 3, gen.sample1 on rank 3\): cancel them"
    with pytest.raises(MeshUsageError, match=f"it would end calls of other ranks {names}"):
        do(world)
    assert world.done == []
    world.states[3] = world.states[2]  # the notebook's, which the core knows
    assert not do(world).failure


HOST_ERROR = HostError("b: disk full")


@pytest.mark.parametrize(
    ("step", "error"),
    [
        *(("bring", KeyboardInterrupt()), ("bring", HOST_ERROR), ("check", HOST_ERROR)),
        *(("check", ValueError("?")), ("note", ValueError("?"))),
    ],
)
def test_fault_before_the_resize_ends_new_agents(step: str, error: Any, world: World) -> None:
    world.faults[step] = error
    with pytest.raises(type(error)) as raised:
        do(world)
    assert "resize" not in world.done
    assert world.done[-2:] == ENDED
    if error is HOST_ERROR:
        assert str(raised.value) == "b: disk full\nb did not join: the mesh is as it was"


@pytest.mark.parametrize("is_late", [False, True])
def test_interrupt_ends_the_new_agents_until_the_core_resizes(is_late: bool, world: World) -> None:
    questions: list[Question] = []

    def ask(question: Question) -> Reply[Any]:
        if is_late:
            question(cast(Core, world), 0.0)
        questions.append(question)
        raise KeyboardInterrupt

    world.ask = ask  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        do(world)
    if not is_late:
        assert world.done[-2:] == ENDED
        questions[0](cast(Core, world), 0.0)  # was withdrawn
    assert ("resize" in world.done) == (world.done[-1] == "resize") == is_late


def test_end_of_the_mesh_ends_the_new_agents(world: World) -> None:
    world.bring = lambda timeout_s: setattr(world, "has_ended", True)  # type: ignore
    assert do(world).failure == "the mesh has ended"
    assert world.done[-1:] == ["end b"]
