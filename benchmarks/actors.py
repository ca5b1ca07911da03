"""Several meshes, actors and copies of weights, beside Monarch and Ray.

``python -m benchmarks.actors``: in each round, every contestant runs once, alone, in a process of
its own, and the next round begins with the next contestant. Of each measure the median of all
rounds is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .contestants import ACTORS
from .environments import DEFAULT_FOLDER
from .figures import Figures
from .machine import describe_machine
from .report import table, targets_table
from .run import measure_all
from .targets import ACTORS_TARGETS
from .units import MILLISECONDS, SECONDS, Unit

_Key = tuple[str, str]


def _own(measure: str) -> _Key:
    return "cellmesh-actors", measure


# A row: what, its figure, and those beside it.
_ROWS: tuple[tuple[str, _Key, Unit, dict[str, _Key]], ...] = (
    *(
        (
            f"second mesh, of 2 ranks, in a {where}",
            ("cellmesh-second", f"{where}_s"),
            SECONDS,
            {"further ones": ("cellmesh-second", f"{where}_more_s")},
        )
        for where in ("script", "notebook")
    ),
    (
        "`mesh.run` of a no-op, before any actor",
        _own("call_s"),
        MILLISECONDS,
        {"lean call": ("lean-call", "call_s")},
    ),
    (
        "no-op method on all",
        _own("method_s"),
        MILLISECONDS,
        {
            "`mesh.run`": _own("run_s"),
            "Monarch": ("monarch-actors", "method_s"),
            "Ray": ("ray-actors", "method_s"),
        },
    ),
    (
        "the same beside 4 waiting calls on each rank",
        _own("method_beside_s"),
        MILLISECONDS,
        {"without them": _own("method_s")},
    ),
    (
        "`mesh.run` beside them",
        _own("run_beside_s"),
        MILLISECONDS,
        {"without them": _own("run_s")},
    ),
    (
        "1,000 sends to all, delivered",
        _own("sends_s"),
        SECONDS,
        {"Monarch's broadcast": ("monarch-actors", "sends_s")},
    ),
    (
        "no-op method, rank to rank",
        _own("other_s"),
        MILLISECONDS,
        {"Ray's, actor to actor": ("ray-actors", "other_s")},
    ),
    *(
        (
            f"100 MB copied, FSDP2 on 4 to {title} on 2",
            ("cellmesh-copy", f"{name}_s"),
            MILLISECONDS,
            {"its memcpys": ("cellmesh-copy", f"{name}_memcpys_s")},
        )
        for title, name in (("whole", "whole"), ("tensor parallel", "parallel"))
    ),
    ("heal beside waiting calls", _own("heal_s"), SECONDS, {}),
    ("killed, made again with 100 MB of weights", _own("restart_s"), SECONDS, {}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.actors", description=__doc__)
    names = [one.name for one in ACTORS]
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=names, action="append", help="repeatable")
    parser.add_argument("--envs", type=Path, default=DEFAULT_FOLDER, help="see benchmarks.run")
    parser.add_argument(
        "--samples", type=Path, help="add to the samples in this file, and show all"
    )
    parser.add_argument("--out", type=Path, help="write the tables here as well, as Markdown")
    arguments = parser.parse_args(argv)
    machine = describe_machine()
    contestants = [one for one in ACTORS if one.name in (arguments.only or names)]
    samples, notes = measure_all(
        contestants, arguments.envs, arguments.rounds, arguments.quick, arguments.samples
    )
    text = document(Figures(samples), machine, notes)
    print(f"\n{text}")
    if arguments.out is not None:
        arguments.out.write_text(text)
    return 0 if all(len(samples.get(n.name, ())) >= arguments.rounds for n in contestants) else 1


def document(figures: Figures, machine: dict[str, str], notes: Sequence[str]) -> str:
    """All of a run, as Markdown."""
    num_rounds = max((len(figures.rounds(*key)) for _, key, _, _ in _ROWS), default=0)
    facts = {**machine, "rounds, of which medians are shown": str(num_rounds)}
    sections = [
        "# Actors",
        (__doc__ or "").partition("\n\n")[2].strip().replace("``", "`"),
        "\n".join(f"- {name}: {fact}" for name, fact in facts.items()),
        figures_table(figures),
        targets_table(figures, ACTORS_TARGETS),
        "## Trouble\n\n" + ("\n".join(f"- {note}" for note in notes) or "None."),
    ]
    return "\n\n".join(sections) + "\n"


def figures_table(figures: Figures) -> str:
    """Medians, and those beside them, with the ratio of these."""
    lines = [["", "cellmesh", "beside it"]]
    for title, key, unit, beside in _ROWS:
        own = figures.get(*key)
        shown = []
        for name, other_key in beside.items():
            other = figures.get(*other_key)
            ratio = f", {own / other:.2f} x" if own is not None and other else ""
            shown.append(f"{name}: {unit.show(other)}{ratio}")
        lines.append([title, unit.show(own), "; ".join(shown)])
    return table(lines)


if __name__ == "__main__":
    sys.exit(main())
