"""Scenarios of a controller's core as text: events in, and after ``->`` the decisions out.

A line is ``EVENT; EVENT; ... [-> DECISIONS]``, with the decisions after its last event; without an
arrow they are not checked. Decisions are joined by ``; ``, none is ``-``, and ``...`` stands for
any text. ``@2.5 EVENT`` sets the clock. `EVENTS` has the events, `describe` writes the decisions.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cellmesh.controller.core.core import (
    Answer,
    Change,
    Core,
    Deliver,
    Effect,
    Finish,
    HealReport,
    Judge,
    Note,
    Send,
    Watch,
)
from cellmesh.controller.core.mesh_state import FIRST_HEAL, HostLost, Returned
from cellmesh.wire.attach import RunInfo, Welcome
from cellmesh.wire.codec import Parcel, at_rank_for_control, at_rank_for_work
from cellmesh.wire.groups import Begun, Blueprint, Describe, GroupCount, Heal, InFlight
from cellmesh.wire.messages import (
    Died,
    Done,
    Failed,
    Failing,
    Interrupt,
    MeshReady,
    Ranked,
    Relay,
    Release,
    Respawn,
    Respawned,
    RespawnFailed,
    StoreDied,
)
from cellmesh.wire.ranks import format_ranks, parse_ranks
from cellmesh.wire.status import Probe, RankInfo, RankState
from cellmesh.wire.stopping import QUIET_MAX_S, Pause, StopState
from cellmesh.wire.verbs import InputCancelled, InputReply, InputRequest

from .core_decisions import counted, infos, ready_core
from .runs import relay

ERRORS = {"fail": "ValueError", "interrupted": "KeyboardInterrupt", "released": "Released"}


def verbs_of(parcel: Parcel[Any]) -> list[tuple[tuple[int, ...], Any]]:
    """(ranks, verb) of what a message to the agent carries to ranks."""
    order, frames = parcel
    if type(order) is not Relay:
        return [((), order)]
    if order.channel == "control" and order.run >= 0:
        return [(order.ranks, order)]
    codec = at_rank_for_control() if order.channel == "control" else at_rank_for_work()
    return [(order.ranks, verb) for verb, _ in codec.decode(frames)]


def describe_report(report: HealReport) -> str:
    """What a recovery did, as ``new 1, healed, failure: ...``."""
    facts = (
        f"new {format_ranks(report.respawned)}" if report.respawned else "",
        "healed" if report.healed else "",
        f"dead {format_ranks(report.dead)}" if report.dead else "",
        ", ".join(report.notes),
        f"failure: {report.failure}" if report.failure else "",
    )
    return ", ".join(filter(None, facts)) or "nothing to do"


def _describe_verb(ranks: tuple[int, ...], verb: Any) -> str:
    name, on = type(verb).__name__.lower(), format_ranks(ranks)
    match verb:
        case Heal():
            like = f" like {verb.blueprint.decode()}" if verb.blueprint else ""
            store = f" port {verb.store_port}" if verb.store_port else ""
            size = f" layout {'+'.join(map(str, verb.layout))}" if verb.num_resizes else ""
            return f"heal {on}{like}{store}{size}" + " keeping groups" * verb.keeps_groups
        case Respawn(ranks):
            return f"respawn {format_ranks(ranks)}"
        case Relay():
            return f"run {verb.run} on {on} control"
        case Interrupt(run, is_aligned):
            return f"interrupt {on} in {_run(run)}" + " aligned" * is_aligned
        case Release(run) | Pause(run):
            return f"{name} {on} in {_run(run)}"
        case InputReply():
            return f"reply to {on}: {verb.text}"
        case _ if hasattr(verb, "ranks"):
            return f"{name} {format_ranks(verb.ranks)}"
        case _ if hasattr(verb, "run"):
            return f"run {verb.run} on {on}"
    return f"{name} {on}".strip()


def _run(run: int) -> str:
    return "heal" if run >= FIRST_HEAL else str(run)


def describe(effects: Iterable[Effect], heard: Any = None) -> list[str]:
    """Write decisions in short; what only passes on the message that was heard is left out."""
    found = []
    for effect in effects:
        match effect:
            case Send(parcel):
                found += [_describe_verb(*each) for each in verbs_of(parcel)]
            case Deliver(run, ranks, (verb, _), has_begun) if verb != heard:
                why = getattr(verb, "reason", getattr(verb, "type_name", ""))
                begun = "" if has_begun else " unbegun"
                found.append(f"end {run} on {format_ranks(ranks)}{begun}: {why}")
            case Finish(run):
                found.append(f"finish {run}")
            case Watch(run, states):
                found.append(f"watch {run}: {format_ranks(states)}")
            case Judge(run, text) | Note(run, text):
                found.append(f"{type(effect).__name__.lower()} {run}: {text}")
            case Answer(_, HealReport() as report):
                found.append(f"report {describe_report(report)}")
            case Answer(_, value):
                found.append(f"answer {value}")
            case Change(_, HealReport() as report):
                found.append(f"healed: {describe_report(report)}")
    return found


class Script:
    """A core, and the requests of it that are not answered yet.

    Args:
        num_ranks: number of ranks.
        attached: runs and dead ranks of a mesh that was there before (`attached 3 dead 1`).
        options: of the core.
    """

    def __init__(self, num_ranks: int, attached: str | None = None, **options: Any) -> None:
        self.now = 0.0
        self.num_ranks = num_ranks
        self.asked: dict[type, tuple[tuple[int, ...], Any]] = {}
        self.effects: list[Effect] = []
        self.heard: Any = None
        self.heal_run = -1
        if attached is None:
            self.core = ready_core(num_ranks, **options)
        else:
            self.core = Core(num_ranks, **options)
            self._attach(attached)

    @classmethod
    def play(cls, text: str) -> Script:
        """Run a scenario whose first line has the number of ranks, options, and what is attached
        to, as ``3 ranks auto_heal=True`` or ``3 ranks attached 1 is dead``.
        """
        head, _, events = text.strip().partition("\n")
        words = re.fullmatch(r"(\d+) ranks((?: \w+=\S+)*)(?: attached(.*))?", head)
        assert words, head
        options = dict(each.split("=") for each in words[2].split())
        read = {name: literal_eval(value) for name, value in options.items()}
        script = cls(int(words[1]), words[3], **read)
        script.run(events)
        return script

    def _attach(self, text: str) -> None:
        phases = dict(re.findall(r"(\S+) is (\w+)", text))
        of_rank = {r: phase for key, phase in phases.items() for r in self.ranks_of(key)}
        runs = tuple(
            RunInfo(int(run), self.ranks_of(ranks), "step()")
            for run, ranks in re.findall(r"run (\d+) on (\S+)", text)
        )
        self.core.receive(Parcel(Welcome(1, 2, "host", next_run=8, runs=runs)), self.now)
        ranks = [RankInfo(rank, 1, "host", "idle") for rank in range(self.num_ranks)]
        for rank, phase in of_rank.items():
            ending = "was killed" if phase == "dead" else ""
            ranks[rank] = RankInfo(rank, 1, "host", phase, ending=ending)  # type: ignore[arg-type]
        self.decide(self.core.receive(Parcel(MeshReady(tuple(ranks))), self.now))

    def run(self, text: str) -> None:
        """Run a scenario, and check the decisions after the last event of each line."""
        for line in filter(None, map(str.strip, text.splitlines())):
            events, arrow, expected = line.partition("->")
            for event in filter(None, map(str.strip, events.split(";"))):
                if event != "attached":
                    self.effects, self.heard = [], None
                time, _, rest = event.partition(" ") if event[0] == "@" else ("", "", event)
                self.now = float(time[1:] or self.now)
                self.happen(rest)
            found = "; ".join(describe(self.effects, self.heard)).strip() or "-"
            pattern = ".*".join(map(re.escape, expected.strip().split("...")))
            assert not arrow or re.fullmatch(pattern, found), f"{line}\n   but: {found}"

    def happen(self, event: str) -> None:
        """Carry out an event, the first of `EVENTS` that fits."""
        for pattern, act in EVENTS.items():
            if words := re.fullmatch(pattern, event):
                act(self, *words.groups(""))
                return
        raise AssertionError(f"no event: {event}")

    def decide(self, effects: list[Effect]) -> None:
        """Note decisions of the core."""
        self.effects += effects
        for effect in effects:
            if type(effect) is Send:
                for ranks, verb in verbs_of(effect.parcel):
                    self.asked[type(verb)] = ranks, verb
                    self.heal_run = verb.run if type(verb) is Heal else self.heal_run

    def receive(self, verb: Any) -> None:
        self.decide(self.core.receive(Parcel(verb), self.now))

    def hear(self, ranks: Iterable[int], verb: Any) -> None:
        self.heard = verb
        self.receive(Ranked(tuple(ranks), verb))

    def ranks_of(self, text: str) -> tuple[int, ...]:
        return parse_ranks(text, max(self.num_ranks, 10)) if text else ()

    def number(self, run: str) -> int:
        if run == "heal":
            self.asked.pop(Heal, None)
        return self.heal_run if run == "heal" else int(run)

    # ---- events

    def submit(self, run: str, ranks: str, channel: Any, title: str) -> None:
        item = relay(int(run), self.ranks_of(ranks), channel or "work", title.strip())
        self.decide(self.core.submit(item, self.now))

    def end(self, ranks: str, how: str, run: str, text: str) -> None:
        """Ranks end a run, with a number of collectives or an error's text."""
        number = self.number(run)
        if how != "done":
            self.hear(self.ranks_of(ranks), Failed(number, ERRORS[how], text, "", 0))
        elif text.startswith("#"):
            self.hear(self.ranks_of(ranks), Done(number, None, counted(int(text[1:]))))
        else:
            self.hear(self.ranks_of(ranks), Done(number, notes=(text,) if text else ()))

    def answer(self, ranks: str, facts: str) -> None:
        """Ranks answer the last probe; ``all`` are those that it went to."""
        asked, probe = self.asked[Probe]
        number = re.search(r"#(\d+)", facts)
        run = re.search(r"in (\d+)", facts)
        where = re.search(r"(waits|cannot) (\w+)", facts)
        more: dict[str, Any] = {"is_broken": "broken" in facts}
        of = re.search(r"of (\S+)", facts)
        name, members = ("a", self.ranks_of(of[1])) if of else ("world", ())
        counts = counted(int(number[1]), members, name) if number else ()
        collective, group = (where[2], name) if where else ("", "")
        if where and where[1] == "cannot":
            begun = (Begun(3, collective, 4, "float32"),)
            counts = (GroupCount("world", (), 3, recent=begun),)
        if where:
            more["in_flight"] = (InFlight(name, collective, counts[0].num_collectives),)
        number_of_run, waited_s = int(run[1]) if run else -1, 9.0 if where else 0.0
        place = (probe.request, number_of_run, 1, 5, "f", collective, "cpu", 0, group, waited_s)
        state = RankState(*place, counts=counts, **more)
        for rank in asked if ranks == "all" else self.ranks_of(ranks):
            self.hear((rank,), state)

    def die(self, ranks: str) -> None:
        for rank in self.ranks_of(ranks):
            self.heard = Died(rank, "was killed", "")
            self.receive(self.heard)

    def respawn(self, ranks: str, why_not: str) -> None:
        found = self.ranks_of(ranks)
        self.asked.pop(Respawn, None)
        new = tuple(
            msgspec.structs.replace(infos(10)[rank], predecessor_ending="was killed")
            for rank in found
        )
        self.receive(RespawnFailed(found, why_not.strip()) if why_not else Respawned(new))

    def heal(self) -> None:
        self.decide(self.core.heal(self.now)[1])

    def resize(self, layout: str) -> None:
        sizes = tuple(map(int, layout.split("+")))
        assert self.core.why_not_resize(sum(sizes)) == ""
        self.decide(self.core.resize(sizes, {"dp": sum(sizes)}, self.now)[1])

    def ticks(self, until: str) -> None:
        """Let time pass from one deadline to the next."""
        while (due := self.core.deadline()) is not None and due <= float(until):
            self.now = max(self.now, due)
            before = len(self.effects)
            self.decide(self.core.tick(self.now))
            assert len(self.effects) > before or self.core.deadline() != due

    def sweep(self) -> None:
        """Let time pass until the next probe."""
        while "probe" not in " ".join(describe(self.effects)):
            assert self.core.deadline() is not None, "no rank is looked at"
            self.ticks(str(self.core.deadline()))

    def only_until(self, kind: str, until: str) -> None:
        """Let time pass, and keep the decisions of one kind."""
        self.ticks(until)
        self.effects = [each for each in self.effects if kind in " ".join(describe([each]))]

    def drive(self) -> None:
        """Idle ranks and the agent do what is asked, until nothing more is."""
        done: list[Effect] = []
        while self.asked.keys() & ACTS:
            kind = next(kind for kind in self.asked if kind in ACTS)
            ranks, verb = self.asked.pop(kind)
            ACTS[kind](self, ranks, verb)
        for effect in self.effects:
            kinds = {type(v) for _, v in verbs_of(effect.parcel)} if type(effect) is Send else set()
            done += [] if kinds and kinds <= ACTS.keys() else [effect]
        self.effects = done

    def be_calm(self) -> None:
        """Nothing is left over: work goes out at once."""
        assert self.core.deadline() is None
        self.submit("999", "0", "", "")
        assert "run 999 on 0" in describe(self.effects)
        self.hear((0,), Done(999))


ACTS: dict[type, Callable[[Script, tuple[int, ...], Any], None]] = {
    Probe: lambda s, ranks, verb: s.hear(
        [rank for rank in ranks if rank not in s.core.dead],
        RankState(verb.request, -1, 0, 0, "", "", "cpu", 0),
    ),
    Describe: lambda s, ranks, verb: s.hear(ranks, Blueprint(verb.request, b"groups")),
    Heal: lambda s, ranks, verb: s.hear(ranks, Done(verb.run)),
    Respawn: lambda s, ranks, verb: s.respawn(format_ranks(verb.ranks), ""),
}
EVENTS: dict[str, Callable[..., None]] = {
    r"run (\d+) on (\S+)(?: (control))?( .+)?": Script.submit,
    r"(\S+) (done|fail|interrupted|released) (\w+) ?(.*)": Script.end,
    r"(\S+) answers?(?: (.*))?": Script.answer,
    r"(\S+) dies?": Script.die,
    r"(\S+) respawned": lambda s, ranks: s.respawn(ranks, ""),
    r"(\S+) not respawned:(.*)": Script.respawn,
    r"(\S+) describes": lambda s, ranks: s.hear(
        s.ranks_of(ranks), Blueprint(s.asked[Describe][1].request, b"groups")
    ),
    r"(\S+) raising (\d+)": lambda s, ranks, run: s.hear(s.ranks_of(ranks), Failing(int(run))),
    r"(\S+) asks in (\d+)": lambda s, ranks, run: s.hear(
        s.ranks_of(ranks), InputRequest(int(run), 77, "? ")
    ),
    r"(\S+) asks no more in (\d+)": lambda s, ranks, run: s.hear(
        s.ranks_of(ranks), InputCancelled(int(run), 77)
    ),
    r"reply to (\d+): (.*)": lambda s, rank, text: s.decide(s.core.reply({int(rank): 77}, text)),
    r"(\S+) quiet in (\d+)": lambda s, ranks, run: s.hear(
        s.ranks_of(ranks), StopState(int(run), False, False, False, QUIET_MAX_S, ())
    ),
    r"host of (\S+) lost": lambda s, ranks: s.receive(HostLost("b", s.ranks_of(ranks), "killed")),
    r"(\d+) returns": lambda s, rank: s.receive(
        Returned((RankInfo(int(rank), 101, "b", "running"),))
    ),
    r"store moves to (\d+)": lambda s, port: s.receive(StoreDied("was killed", int(port))),
    r"interrupt ([\d ]+)": lambda s, runs: s.decide(
        s.core.interrupt(list(map(int, runs.split())), s.now)
    ),
    r"wait for (\d+)": lambda s, run: s.decide(s.core.wait_for(int(run))),
    r"heal": Script.heal,
    r"abandon": lambda s: s.decide(s.core.abandon_heal()),
    r"resize to (\S+)": Script.resize,
    r"mesh ready": lambda s: s.receive(MeshReady(infos(s.num_ranks))),
    r"restart": lambda s: s.decide(s.core.restart()),
    r"stop": lambda s: s.decide(s.core.stop()),
    r"agent ends": lambda s: s.decide(s.core.agent_ended("its process ended")),
    r"tick": lambda s: s.decide(s.core.tick(s.now)),
    r"until (\S+)": Script.ticks,
    r"sweep": Script.sweep,
    r"(release|kill|probe)s until (\S+)": Script.only_until,
    r"drive": Script.drive,
    r"calm": Script.be_calm,
    r"attached": lambda s: None,
}  # fmt: skip
