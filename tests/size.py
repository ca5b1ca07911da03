"""How large cellmesh is, by feature, and whether a feature has outgrown its budget.

    python -m tests.size
    python -m tests.size --call     # starts a mesh, and counts what a call passes
    python -m tests.size --draw 60  # first lines of docstrings, for a reader who does not know them

Code lines are lines with a token, without docstrings, comments, blank lines and imports. It fails
when a feature has over 5 % more of them than its budget. Whoever raises a budget says in the same
commit what for, and what the new lines replace.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.import_graph import PACKAGE, circles, imports_of_modules, statements

TESTS = Path(__file__).parent
LEEWAY = 1.05
SMALL = 30  # a module of so few code lines is a part of something


@dataclass(frozen=True)
class Feature:
    """A feature, or a part of the runtime.

    Attributes:
        name: of the feature.
        budget: code lines that it may have.
        paths: its files and folders, below ``cellmesh/``. The longest path that a file is in
            decides which feature it belongs to.
    """

    name: str
    budget: int
    paths: str


FEATURES = (
    Feature(
        "package",
        124,
        "__init__.py __main__.py errors.py stdlib.py",
    ),
    Feature(
        "messages between processes",  # with Results, which ranks give as well
        1233,  # 15 to choose an actor's ranks, which handles did in two ways
        "wire/",
    ),
    Feature(
        "pickling and large values",
        1444,
        "wire/payload.py wire/plain_functions.py wire/segments.py wire/segment_pool.py "
        "wire/bulk.py wire/values.py "
        "controller/values/ workers/rank/value_transfer.py",
    ),
    Feature(
        "edited modules",
        199,
        "wire/modules.py",
    ),
    Feature(
        "mesh, ranks and runs",  # with spawn, drop and redefine of actors
        1280,
        "controller/ wire/mesh_dims.py",
    ),
    Feature(
        "decisions (core)",
        2027,
        "controller/core/",
    ),
    Feature(
        "session",  # with runs that others have begun
        1050,
        "controller/session/",
    ),
    Feature(
        "attach",
        374,
        "wire/attach.py controller/session/attach.py controller/session/living.py",
    ),
    Feature(
        "start and its options",
        850,
        "controller/options.py wire/options.py controller/host_list.py "
        "controller/session/start.py controller/session/alike.py "
        "controller/session/surroundings.py "
        "wire/environment.py wire/ticket.py",
    ),
    Feature(
        "hosts",
        2293,
        "controller/session/hosts/ controller/session/launch/ controller/session/standing.py "
        "workers/agent/on_host.py "
        "workers/agent/port.py wire/hosts.py wire/curve.py",
    ),
    Feature(
        "this host",
        166,
        "controller/session/launch/local.py",
    ),
    Feature(
        "Slurm and Ray",
        62,
        "controller/engines.py",
    ),
    Feature(
        "Ray's driver",
        149,
        "controller/session/launch/ray_driver.py",
    ),
    Feature(
        "prestart",
        565,
        "controller/session/launch/prestart.py workers/prestart.py wire/waiting.py",
    ),
    Feature(
        "modules imported once",
        455,
        "wire/preload.py controller/preload.py workers/preload.py workers/warm_up.py",
    ),
    Feature(
        "resize",
        147,  # 4 of them to name the calls of other ranks that it would end
        "controller/resizing.py",
    ),
    Feature(
        "code sync",
        432,
        "controller/code_files/ workers/agent/code_files.py",
    ),
    Feature(
        "output",
        1404,
        "controller/output/",
    ),
    Feature(
        "scripts",
        195,
        "workers/rank/script.py",
    ),
    Feature(
        "input and debugger",
        250,
        "controller/stdin.py workers/rank/stdin.py workers/rank/debugger.py",
    ),
    Feature(
        "bars",
        431,
        "controller/output/bars.py workers/progress.py",
    ),
    Feature(
        "inspector",
        2814,
        "wire/inspect.py controller/inspect.py workers/inspect/ workers/static_lookup.py "
        "magics/views/inspector/ magics/render/inspections.py",
    ),
    Feature(
        "timeline and profile",
        1269,
        "wire/trace.py controller/trace/ workers/trace/ magics/render/profiles.py "
        "magics/render/timeline.py",
    ),
    Feature(
        "plots",
        630,
        "controller/metrics.py workers/metrics.py magics/render/plots.py magics/views/plot/",
    ),
    Feature(
        "status",
        430,
        "wire/status.py controller/status.py "
        "workers/rank/stack_inspection.py workers/rank/memory.py",
    ),
    Feature(
        "dashboard",
        314,
        "magics/views/dashboard/",
    ),
    Feature(
        "widgets and tables",  # with that of actors
        565,
        "controller/live_views.py magics/views/ magics/render/",
    ),
    Feature(
        "replicas",
        1015,
        "wire/replicas.py controller/replicas.py workers/replicas/",
    ),
    Feature(
        "checkpoints",
        417,
        "controller/checkpoint.py workers/checkpoint.py",
    ),
    Feature(
        "actors",  # 15 of them so that a refused spawn and a death leave no false state
        547,
        "wire/nests.py wire/value_stream.py controller/actors.py workers/rank/actors.py",
    ),
    Feature(
        "handles of actors on ranks",  # with that of the mesh; and calls from rank to rank
        770,  # 45 so that the main thread reads sockets: a call takes half as long; 57 for streams;
        # 8 for methods that travel, and meshes that this process cannot use, or not yet
        "wire/handles.py workers/rank/handles.py workers/rank/peer_connections.py "
        "workers/rank/remote_actors.py",
    ),
    Feature(
        "calls from rank to rank, as the controller knows them",
        127,  # with the verb of those between hosts
        "wire/peer_calls.py controller/core/peer_calls.py workers/rank/peer_calls.py",
    ),
    Feature(
        "calls between hosts",  # by way of the controller
        170,  # with values of any size, in chunks
        "controller/routing.py workers/rank/relayed.py",
    ),
    Feature(
        "supervision of actors",  # 32 of them for functions of the user that hang
        297,
        "controller/supervision.py controller/actor_records.py workers/rank/actor_states.py",
    ),
    Feature(
        "weights between meshes",  # in place of a pull and a push, which take ten times as long
        600,  # with mappings that are kept: page faults took as long as the copy
        "wire/weights.py controller/weights.py workers/weights.py",
    ),
    Feature(
        "links",  # process groups over two meshes
        335,
        "controller/links.py workers/links.py",
    ),
    Feature(
        "completion",
        281,  # 5 for methods of a part of an actor, which IPython does not evaluate
        "workers/complete.py magics/completion.py",
    ),
    Feature(
        "agent",  # 12 of them for messages of ranks that no controller passes on
        2187,
        "workers/agent/ workers/linux_process.py",
    ),
    Feature(
        "zygote",  # 10 of them so that a silent connection delays no fork
        315,
        "workers/zygote.py",
    ),
    Feature(
        "calls that wait",  # and work that other ranks send, which a failed one may hold back
        245,  # 13 for tasks that wait within no_grad or inference_mode; 15 to read other ranks
        "workers/rank/tasks.py",
    ),
    Feature(
        "ranks' processes",
        2220,  # 15 to release a rank from a link, 15 to stop ranks at the end of an import
        "workers/",
    ),
    Feature(
        "process groups",
        2250,  # with the requests of links
        "wire/groups.py workers/groups/",
    ),
    Feature(
        "models and other groups after a heal",
        701,
        "workers/groups/model_reset/ workers/rank/optimizer_steps.py",
    ),
    Feature(
        "magics",
        850,
        "magics/",
    ),
    Feature(
        "export",
        772,
        "magics/export/",
    ),
    Feature(
        "command line",
        350,
        "cli/",
    ),
    Feature(
        "commands on a living mesh",
        510,
        "controller/acts.py controller/session/guests.py cli/remote.py",
    ),
    Feature(
        "cellmesh run",  # options, output and end of a script, in place of torchrun
        610,
        "cli/run.py cli/launch.py cli/execution.py cli/torchrun.py cli/script_output.py",
    ),
    Feature(
        "doctor",
        287,
        "cli/doctor.py",
    ),
)


def python_code_lines(source: str) -> int:
    """The code lines of a module."""
    dropped: set[int] = set()
    module = ast.parse(source)
    for node in (module, *statements(module)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            dropped.update(_lines_of(node))
        elif isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            dropped.update(_lines_of(node.body[0]))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - dropped)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _lines_of(node: ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def browser_code_lines(source: str) -> int:
    """The code lines of JavaScript or CSS whose comments stand on lines of their own."""
    without = re.sub(r"^\s*/\*.*?\*/|^\s*//.*?$|^import\b[^;]*;", "", source, flags=re.M | re.S)
    return sum(bool(line.strip()) for line in without.splitlines())


def code_lines(path: Path) -> int:
    """The code lines of a file of the package."""
    source = path.read_text()
    return python_code_lines(source) if path.suffix == ".py" else browser_code_lines(source)


def files_of(package: Path = PACKAGE) -> dict[str, int]:
    """The code lines of the package's files by path; the builds of others are left out."""
    return {
        str(path.relative_to(package)): code_lines(path)
        for path in sorted(package.rglob("*"))
        if path.suffix in (".py", ".js", ".css") and "vendor" not in path.parts
    }


def feature_of(path: str, features: Iterable[Feature]) -> Feature | None:
    """The feature that a file belongs to."""
    fitting = [
        (len(each), feature)
        for feature in features
        for each in feature.paths.split()
        if path == each or (each.endswith("/") and path.startswith(each))
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def problems(files: Mapping[str, int], features: Iterable[Feature]) -> Iterator[str]:
    """Files without a feature, paths without a file, and features over their budgets."""
    features = list(features)
    paths = [path for feature in features for path in feature.paths.split()]
    for path in files:
        if feature_of(path, features) is None:
            yield f"{path} belongs to no feature: add it to one in tests/size.py"
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield f"{path} belongs to two features in tests/size.py"
    for feature, lines in by_feature(files, features).items():
        if lines > feature.budget * LEEWAY:
            yield (
                f"{feature.name} has {lines} code lines, over its budget of {feature.budget} by "
                f"more than 5 %: cut it, or raise the budget in the same commit, with the reason"
            )


def by_feature(files: Mapping[str, int], features: Iterable[Feature]) -> dict[Feature, int]:
    """The code lines of each feature."""
    sums = dict.fromkeys(features, 0)
    for path, lines in files.items():
        feature = feature_of(path, sums)
        if feature is not None:
            sums[feature] += lines
    return sums


def hints(files: Mapping[str, int], features: Iterable[Feature]) -> Iterator[str]:
    """Budgets far above what is there, and paths that no file has any more."""
    for feature, lines in by_feature(files, features).items():
        if feature.budget > 1.2 * lines:
            yield f"{feature.name}: lower the budget to {lines}"
        for path in feature.paths.split():
            if not any(file.startswith(path) for file in files):
                yield f"{feature.name}: no file is at {path}"


def draw_docstrings(number: int) -> list[str]:
    """First lines of docstrings, drawn at random from all of the package."""
    first_lines = []
    for path in PACKAGE.rglob("*.py"):
        module = ast.parse(path.read_text())
        for node in (module, *statements(module)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                docstring = ast.get_docstring(node)
                if docstring:
                    name = getattr(node, "name", path.stem)
                    first = docstring.split("\n\n")[0].replace("\n", " ")
                    first_lines.append(f"{path.relative_to(PACKAGE)} {name}: {first}")
    return random.sample(first_lines, number)


def report(files: Mapping[str, int]) -> Iterator[str]:
    """The table of features, and the one by which the size is judged."""
    for feature, lines in sorted(by_feature(files, FEATURES).items(), key=lambda pair: -pair[1]):
        yield f"{lines:6,} of {feature.budget:6,}  {feature.name}"
    python = sum(lines for path, lines in files.items() if path.endswith(".py"))
    modules = [path for path in files if path.endswith(".py")]
    small = sum(0 < files[path] <= SMALL for path in modules)
    found = circles(imports_of_modules())
    test_lines = sum(len(path.read_text().splitlines()) for path in TESTS.rglob("*.py"))
    yield ""
    yield f"{'':40} {'e108bff':>8} {'now':>8} {'to reach':>8}"
    for name, before, now, goal in (
        ("code lines of Python", 36_332, python, 29_500),
        ("code lines of JS and CSS", 2_434, sum(files.values()) - python, 1_400),
        ("modules", 343, len(modules), 250),
        (f"modules of {SMALL} code lines or fewer", 46, small, 0),
        ("import circles of files", 5, len(found), 0),
        ("lines of tests", 65_035, test_lines, 46_000),
    ):
        yield f"{name:40} {before:8,} {now:8,} {goal:8,}"
    yield from (f"circle of {len(circle)}: {' '.join(circle)}" for circle in found)


def main() -> int:
    """Print the tables; 1 when a feature is over its budget or a file belongs to none."""
    parser = argparse.ArgumentParser(prog="python -m tests.size")
    parser.add_argument("--call", action="store_true", help="count what a call passes")
    parser.add_argument("--draw", type=int, metavar="N", help="print N docstrings' first lines")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        print("\n".join(draw_docstrings(arguments.draw)))
        return 0
    files = files_of()
    print("\n".join(report(files)))
    if arguments.call:
        from tests.support.call_path import call_path

        modules, calls = call_path()
        print(f"{'modules that a call passes':40} {30:8} {modules:8} {20:8}")
        print(f"{'Python calls of a call':40} {157:8} {calls:8} {130:8}")
    for hint in hints(files, FEATURES):
        print(hint)
    failures = list(problems(files, FEATURES))
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
