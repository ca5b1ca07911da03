"""Actors, as the notebook directs them; no ranks take part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellmesh.controller import actors, rank_set
from cellmesh.controller.actor_records import read_all
from cellmesh.controller.core.effects import Change
from cellmesh.controller.core.mesh_state import HostLost, Returned
from cellmesh.controller.mesh import Mesh
from cellmesh.controller.output.fold import Block, Trace
from cellmesh.controller.rank_set import RankSet
from cellmesh.controller.run import Run, WorkItem
from cellmesh.errors import MeshUsageError
from cellmesh.wire.codec import Parcel
from cellmesh.wire.messages import Died, Done, Failed, Respawned

from ...support.runs import FakeControl
from ...support.tickets import make_ticket


class Counter:
    def __init__(self, *args: Any) -> None: ...

    def fail(self) -> None: ...


class Recorder:
    """A sink that keeps what it is shown."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def show(self, blocks: Sequence[Block]) -> None:
        self.items += [block.item for block in blocks]

    def note(self, text: str) -> None:
        self.items.append(text)

    def status(self, text: str, final: bool) -> None: ...


class Session:
    """The parts of a mesh's session that actors use; its ranks answer each call with None."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.num_ranks, self.actors = name, 2, dict[str, Any]()
        self.ticket = make_ticket(name=name, directory=str(directory))
        infos = [SimpleNamespace(rank=rank, pid=10 + rank) for rank in range(2)]
        self.core = SimpleNamespace(dead={}, mesh=SimpleNamespace(ranks=infos))
        self.dead_ranks, self.supervisor, self.has_hosts = set[int](), None, False
        self.displays = SimpleNamespace(folds_numbers=False, heading=None)
        self.segments = SimpleNamespace(lend_pickle=lambda *pickled: pickled)
        self.runs = SimpleNamespace(start_run=self._start_run, make_room=lambda *args: None)
        self.answer: Any = Done(1)

    def _start_run(self, item: WorkItem, printer: Any) -> Run[Any]:
        run: Run[Any] = Run(1, item, printer, FakeControl())
        for rank in item.ranks:
            run.settle((rank,), Parcel(self.answer), 0.0)
        run.finish(0.0)
        return run


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(rank_set, "current_sink", lambda displays: recorder)
    return recorder


@pytest.fixture
def session(tmp_path: Path, sink: Recorder) -> Any:
    return Session("trainer", tmp_path)


@pytest.fixture
def mesh(session: Any) -> Mesh:
    return Mesh(session)


@pytest.mark.parametrize("operation", ["send", "submit"])
def test_a_failure_is_shown_once_with_its_actor_and_method(
    mesh: Mesh, session: Any, sink: Recorder, operation: str
) -> None:
    one, other = (mesh.spawn(Counter, name=name) for name in ("one", "other"))
    session.answer = Failed(1, "ValueError", "no", "Traceback\nValueError: no\n", 3)
    for each in (one, other):
        getattr(each.fail, operation)()
    assert [(item.text, item.traceback) for item in sink.items if isinstance(item, Trace)] == [
        ("no", f"Traceback\nValueError: no\nraised by {name}.fail") for name in ("one", "other")
    ]
    assert len(sink.items) == 2


def test_a_handle_of_another_mesh_and_what_is_no_class_are_refused(
    mesh: Mesh, session: Any, tmp_path: Path
) -> None:
    actor: Any = mesh.spawn(Counter)
    other = Mesh(Session("generator", tmp_path))  # type: ignore[arg-type]
    for use in (other.drop, lambda actor: other.redefine(actor, Counter)):
        with pytest.raises(MeshUsageError, match="counter is an actor of trainer, another mesh"):
            use(actor)
    with pytest.raises(MeshUsageError, match="3 is no actor"):
        mesh.drop(3)  # type: ignore[arg-type]
    with pytest.raises(MeshUsageError, match=r"3 is no class: mesh\.redefine\(counter, Trainer\)"):
        mesh.redefine(actor, 3)  # type: ignore[arg-type]
    with pytest.raises(MeshUsageError, match=r"3 is no class: mesh\.spawn"):
        mesh.spawn(3)  # type: ignore[arg-type]
    assert [*session.actors] == ["counter"]


class Saving:
    checkpoint_every: Any = "often"


@pytest.mark.parametrize(
    ("kind", "on_death", "text"),
    [
        (Counter, "x", "on_death='x': 'fail', 'restart', or a function of the actor and its new"),
        (Counter, None, "on_death=None: 'fail', 'restart', or a function"),
        (Saving, "restart", "Saving.checkpoint_every is 'often': the number of calls after which"),
        (Saving, "fail", "Saving.checkpoint_every is 'often'"),
    ],
)
def test_arguments_on_deaths_that_cannot_be_used_are_refused(
    mesh: Mesh, session: Any, kind: type, on_death: Any, text: str
) -> None:
    with pytest.raises(MeshUsageError, match=re.escape(text)):
        mesh.spawn(kind, on_death=on_death)
    assert not session.actors


@pytest.mark.parametrize("every", [-1, True, 1.0])
def test_a_number_of_calls_that_is_none_is_refused(
    mesh: Mesh, every: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saving, "checkpoint_every", every)
    with pytest.raises(MeshUsageError, match=f"checkpoint_every is {every}"):
        mesh.spawn(Saving)


def test_a_copy_to_what_is_no_mesh_is_refused(mesh: Mesh) -> None:
    with pytest.raises(MeshUsageError, match=r"to='trainer' is no mesh: copy to ranks, as in to="):
        mesh.copy("model", to="trainer")  # type: ignore[arg-type]


# ---- records, for notebooks that attach


def read(session: Any) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The actors that a notebook finds which attaches to the mesh, and its remarks."""
    found, remarks = read_all(session)
    return {each["name"]: each for each in found}, remarks


def test_an_actor_with_long_arguments_is_restored_but_not_made_again(
    mesh: Mesh, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmesh.controller.supervision.Supervisor", lambda session: watcher)
    watcher = SimpleNamespace(watch=lambda spawned: None)
    for name, num_bytes in (("short", 200 << 10), ("long", 257 << 10)):
        mesh.spawn(Counter, bytes(num_bytes), name=name, on_death="restart")
    found, remarks = read(session)
    assert not remarks
    assert [*found] == ["short", "long"]
    assert [each["ranks"] for each in found.values()] == [[0, 1], [0, 1]]
    assert (found["short"]["on_death"], found["short"]["args"]) == ("restart", (bytes(200 << 10),))
    assert (found["long"]["on_death"], found["long"]["args"]) == ("fail", ())
    session.actors.clear()
    assert not actors.restore(RankSet(session, (0, 1)))
    assert [each.on_death for each in session.actors.values()] == ["restart", "fail"]


def test_a_record_that_cannot_be_read_is_named_and_costs_no_other(
    mesh: Mesh, session: Any, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        mesh.spawn(Counter, name=name)
    (tmp_path / "actor-bad.json").write_text("{")
    session.core.mesh.ranks[1].pid = 99  # it was replaced since
    found, remarks = read(session)
    assert {name: each["lost"] for name, each in found.items()} == {"good": {1}}
    assert [text.startswith("bad cannot be used here: ") for text in remarks] == [True]


def test_an_actor_on_a_host_that_returns_is_not_lost(mesh: Mesh) -> None:
    mesh.spawn(Counter)
    (spawned,) = mesh.rank_set.session.actors.values()

    def note(*causes: Any) -> set[int]:
        for cause in causes:
            spawned.note(Change("ready", cause))
        return spawned.lost

    lost = Died(1, "was on far, which is lost", "")
    back = Returned((SimpleNamespace(rank=1),))  # type: ignore[arg-type]
    assert note(HostLost("far", (1,), "cut"), lost) == {1}
    assert note(back) == set()
    assert note(Died(1, "killed", ""), Respawned(back.ranks)) == {1}
    assert note(HostLost("far", (1,), "cut"), lost, back) == {1}  # it was replaced before
