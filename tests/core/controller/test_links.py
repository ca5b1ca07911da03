"""Links between two meshes, as the notebook directs them; no ranks take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller import links
from cellmesh.controller.core.effects import Change, HealReport
from cellmesh.controller.links import MeshLink
from cellmesh.controller.mesh import Mesh
from cellmesh.errors import HostError, MeshUsageError
from cellmesh.wire.groups import SetLink
from cellmesh.wire.messages import Died, Done, Failed, MeshReady, Stopped
from cellmesh.wire.status import RankInfo


class Session:
    """The parts of a mesh's session that a link uses."""

    def __init__(self, name: str, num_ranks: int, backend: str = "gloo") -> None:
        infos = [RankInfo(rank, 1, "host", "idle", backend=backend) for rank in range(num_ranks)]
        mesh = SimpleNamespace(
            num_ranks=num_ranks, ranks=infos, store_port=7 if name == "a" else 0, store_address=""
        )
        self.core = SimpleNamespace(mesh=mesh, state="ready", dead={}, lost=set())
        self.name, self.num_ranks, self.links = name, num_ranks, dict[str, Any]()
        self.ticket, self.busy = SimpleNamespace(env={}, spans_hosts=True), set[int]()
        self.has_hosts = False
        self.runs = SimpleNamespace(busy_ranks=lambda: self.busy, check_usable=lambda ranks: None)


class Sent:
    """A request of a link to the ranks of one mesh, which `end` answers."""

    def __init__(self, session: Session, ranks: Any, request: SetLink, channel: str) -> None:
        self.session, self.ranks, self.request, self.channel = session, ranks, request, channel
        self.answers, self.title, self._ends = dict[int, str](), "the link", list[Any]()

    def on_end(self, callback: Any) -> None:
        self._ends.append(callback)

    def end(self, answer: str = "") -> None:
        self.answers = dict.fromkeys(self.ranks, answer)
        for callback in self._ends:
            callback()

    def failed_ranks(self) -> list[int]:
        return []

    def result(self) -> dict[int, str]:
        return self.answers


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    found = list[Sent]()

    def rank_set(session: Any, ranks: Any, is_single: bool = False) -> Any:
        def start(request: Any, title: str = "", *, channel: str, sink: Any = None) -> Any:
            if is_single:  # where is its store?
                return SimpleNamespace(result=lambda timeout_s: "here")
            found.append(Sent(session, ranks, request, channel))
            return found[-1]

        return SimpleNamespace(start=start)

    monkeypatch.setattr(links, "RankSet", rank_set)
    return found


def make(*sessions: Any) -> MeshLink:
    made = MeshLink("w", sessions or (Session("a", 2), Session("b", 3)), ["here", "there"])  # type: ignore[arg-type]
    for each in made._sessions:
        each.links["w"] = made
    return made


def take(sent: list[Sent]) -> list[Sent]:
    taken, sent[:] = [*sent], []
    return taken


def connect(made: MeshLink, sent: list[Sent]) -> None:
    made.renew("open", "it is new")
    for each in take(sent)[2:]:
        each.end()
    assert not made.problem


def test_ranks_get_each_state_beside_their_work_and_in_its_order(sent: list[Sent]) -> None:
    made = make()
    made.renew("open", "it is new")
    assert [(each.session.name, each.channel) for each in sent] == [
        ("a", "control"), ("b", "control"), ("a", "work"), ("b", "work"),
    ]  # fmt: skip
    first, second = (each.request for each in sent[2:])
    assert (first.first, second.first, first.size, second.size) == (0, 2, 5, 5)
    assert (first.address, first.port, first.backend) == ("here", 7, "gloo")
    assert first.patience_s > 0
    assert first.number == second.number
    *_, on_a, on_b = take(sent)
    on_a.end()
    assert made.problem
    on_b.end()
    assert not made.problem
    assert repr(made) == "<link 'w' of a (2 ranks) and b (3 ranks): connected>"


def test_busy_ranks_do_not_make_others_wait_and_are_asked_once_more(sent: list[Sent]) -> None:
    made = make()
    made._sessions[1].busy = {0}  # type: ignore[attr-defined]
    made.renew("open", "it is new")
    assert [each.request.patience_s for each in sent] == [0.0] * 4
    made._sessions[1].busy = set()  # type: ignore[attr-defined]
    for each in take(sent)[2:]:
        each.end("it is not connected")
    assert [each.channel for each in sent] == ["work", "work"]
    assert all(each.request.patience_s for each in sent)


def test_a_try_that_fails_is_repeated_on_a_new_connection_a_few_times(sent: list[Sent]) -> None:
    made, numbers = make(), list[int]()
    made.renew("open", "it is new")
    while found := take(sent)[2:]:
        numbers.append(found[0].request.number)
        for each in found:
            each.end("no descriptors")
    assert len({*numbers}) == links._MAX_TRIES
    assert made.problem == "no descriptors"


def test_a_death_takes_the_link_down_until_the_heal(sent: list[Sent]) -> None:
    made = make()
    connect(made, sent)
    core: Any = made._sessions[1].core
    died = core.dead[1] = Died(1, "was killed by SIGKILL", "")
    core.lost = {1}
    made.note("b", Change("ready", died))
    assert {each.request.reason for each in sent} == {"rank 1 of b was killed by SIGKILL"}
    assert all("`%dist_heal --on b`" in each.request.lack for each in sent)
    assert [each.ranks for each in sent[2:]] == [[0, 1], [0, 2]]
    take(sent)
    core.dead, core.lost = {}, set()
    made.note("b", Change("ready", HealReport(respawned=(1,))))
    assert [(each.request.state, each.request.lack) for each in sent] == [("open", "")] * 4


def test_a_restart_and_a_resize_make_the_link_again(sent: list[Sent]) -> None:
    made = make()
    connect(made, sent)
    number, core = made._spec.number, made._sessions[1].core
    core.mesh.store_port, made._sessions[0].core.mesh.store_port = 9, 0
    made.note("b", Change("ready", MeshReady((), 9)))
    assert made.problem
    assert {each.request.reason for each in sent} == {"b was restarted"}
    assert all(each.request.number > number for each in sent)
    assert (sent[0].request.port, sent[0].request.address) == (9, "there")
    for each in take(sent)[2:]:
        each.end()
    assert not made.problem
    made.note("b", Change("ready", HealReport()))
    assert not sent  # a heal that has replaced nobody
    core.mesh.num_ranks = 1
    made.note("b", Change("ready", HealReport()))
    assert {(each.request.reason, each.request.size) for each in sent} == {("b was resized", 3)}
    assert [each.ranks for each in sent[2:]] == [[0, 1], [0]]


@pytest.mark.parametrize(
    ("verb", "interleaves", "reason"),
    [
        (Failed(1, "ValueError", "no", "", 0), False, "rank 1 of a raised ValueError"),
        (Failed(1, "KeyboardInterrupt", "", "", 0), False, "rank 1 of a was interrupted"),
        (Failed(1, "CancelledError", "", "", 0), True, ""),
        (Done(1), False, ""),
    ],
)
def test_a_failed_run_ends_what_waits(
    sent: list[Sent], verb: Any, interleaves: bool, reason: str
) -> None:
    made = make()
    connect(made, sent)
    outcomes = {0: Done(1), 1: verb}
    run: Any = SimpleNamespace(outcomes=lambda: outcomes, is_query=False, interleaves=interleaves)
    made.note_end("a", run)
    assert {each.request.reason for each in sent} == ({reason} if reason else set())


def test_the_end_of_a_mesh_drops_the_link_and_what_follows_is_ignored(sent: list[Sent]) -> None:
    made = make()
    connect(made, sent)
    made.note("b", Change("ended", Stopped("stopped")))
    assert {each.request.state for each in take(sent)} == {"dropped"}
    assert not any(each.links for each in made._sessions)
    made.note("a", Change("ended", Stopped("stopped")))
    made.drop()
    assert not sent
    assert not made.wait(0.0)


@pytest.mark.parametrize(
    ("backends", "backend"),
    [
        (("gloo", "gloo"), "gloo"),
        (("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"), "cpu:gloo,cuda:nccl"),
        (("cpu:gloo,cuda:nccl", "gloo"), "cpu:gloo,cuda:gloo"),
    ],
)
def test_the_backend_is_that_of_both(
    sent: list[Sent], backends: tuple[str, str], backend: str
) -> None:
    made = make(Session("a", 1, backends[0]), Session("b", 1, backends[1]))
    made.renew("open", "it is new")
    assert {each.request.backend for each in sent} == {backend}


@pytest.fixture
def meshes(sent: list[Sent], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three meshes of this process, of which the first one has a process group."""
    found = {name: Mesh(Session(name, 2)) for name in "abc"}  # type: ignore[arg-type]
    monkeypatch.setattr(links, "own_meshes", lambda: found)
    return found


def session_of(mesh: Any) -> Any:
    return mesh.rank_set.session


def test_meshes_that_cannot_be_linked_are_refused(meshes: dict[str, Any], sent: list[Sent]) -> None:
    a, b, c = meshes.values()
    for others, text in (
        ((b, c), "neither b nor c has a process group, .*: start one of them with a group"),
        ((a, Mesh(Session("b", 2))), r"b is no mesh of this process: cellmesh\.meshes has all"),  # type: ignore[arg-type]
        ((a, "b"), "takes two meshes, and 'b' is none"),
        ((a, a), "a cannot be linked with itself"),
    ):
        with pytest.raises(MeshUsageError, match=text):
            links.link(*others)
    session_of(b).has_hosts = True
    for pair in ((a, b), (b, a)):
        with pytest.raises(MeshUsageError, match=r"^a runs on this machine alone, and other hosts"):
            links.link(*pair)
    assert not any(session_of(mesh).links for mesh in (a, b, c))
    assert not sent


def test_a_link_that_is_not_made_in_time_is_dropped_and_says_who_is_busy(
    meshes: dict[str, Any], sent: list[Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    monkeypatch.setattr(MeshLink, "wait", lambda made, timeout_s: waits.append(timeout_s))
    session_of(meshes["b"]).busy = {1}
    text = r"^a \(0 ranks busy\) and b \(1 ranks busy\) were not linked within 60 s: it is being"
    with pytest.raises(HostError, match=text):
        links.link(meshes["a"], meshes["b"])
    assert waits == [60.0]
    assert [each.request.state for each in sent[-2:]] == ["dropped"] * 2
    assert not any(session_of(mesh).links for mesh in meshes.values())
