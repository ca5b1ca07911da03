"""Writes the API reference of cellmesh's public names from their docstrings (`make docs`).

    python -m docs.reference build/docs

It writes nothing and lists each place where a public class, function or property has no docstring,
a docstring describes an argument that its function does not take, or a name between single
backticks is not in the reference. A warning of pdoc's is an error.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pdoc
import pdoc.doc
import pdoc.render

# What `cellmesh` exports, and what its methods return: modules, and the public names of each (of
# the first two, all).
PUBLIC = {
    "cellmesh": (),
    "cellmesh.errors": (),
    "cellmesh.controller.ranks": ("Ranks",),
    "cellmesh.controller.actors": ("Actor", "Method", "NoMethodError"),
    "cellmesh.controller.core.effects": ("HealReport",),
    "cellmesh.controller.inspect": ("Inspection", "Spread"),
    "cellmesh.controller.metrics": ("Plot",),
    "cellmesh.controller.replicas": ("CheckReport", "Difference", "SyncSummary"),
    "cellmesh.controller.trace.history": ("History",),
    "cellmesh.controller.trace.operations": ("Lateness",),
    "cellmesh.controller.trace.profile": ("OperatorByRank", "Profile"),
    "cellmesh.wire.inspect": ("TensorSummary",),
    "cellmesh.wire.value_stream": ("ValueStream",),
}
_REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_ARGUMENTS = re.compile(r"^Args:\n((?: .*\n|\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}\*{0,2}(\w+):", re.MULTILINE)


def load(public: dict[str, tuple[str, ...]]) -> list[pdoc.doc.Module]:
    """Import the modules, and limit what pdoc sees of each to its public names."""
    modules = []
    for name, exported in public.items():
        module = importlib.import_module(name)
        if exported:
            module.__dict__["__all__"] = exported
            module.__doc__ = ""  # it speaks to those who change the module
        for attribute in getattr(module, "__all__", ()):  # pdoc sees no name that is loaded lazily
            module.__dict__[attribute] = getattr(module, attribute)
        modules.append(pdoc.doc.Module(module))
    return modules


def walk(namespace: pdoc.doc.Namespace) -> Iterator[pdoc.doc.Doc]:
    """The public members that a module exports or a class defines, and theirs."""
    is_module = isinstance(namespace, pdoc.doc.Module)
    for member in namespace.members.values() if is_module else namespace.own_members:
        if not member.name.startswith("_"):
            yield member
            if isinstance(member, pdoc.doc.Class):
                yield from walk(member)


def arguments_of(member: pdoc.doc.Doc) -> set[str]:
    """The names that a function, or a class when it is made, takes."""
    if isinstance(member, pdoc.doc.Class):
        member = member.members.get("__init__", member)
    if isinstance(member, pdoc.doc.Function):
        return {*member.signature.parameters}
    return set()


def needs_docstring(member: pdoc.doc.Doc) -> bool:
    """Whether it is a class, a function or a property: fields are described with their class."""
    if isinstance(member, pdoc.doc.Variable):
        *classes, name = member.qualname.split(".")
        holder = functools.reduce(getattr, classes, sys.modules[member.modulename])
        return isinstance(inspect.getattr_static(holder, name, None), property)
    return not isinstance(member, pdoc.doc.Module)


def find_problems(modules: Iterable[pdoc.doc.Module]) -> list[str]:
    """What is missing or wrong in the docstrings of these modules: a line each."""
    documented: list[pdoc.doc.Doc] = []
    for module in modules:
        documented += [module, *walk(module)]
    known = {name for member in documented for name in (member.name, member.qualname)}
    problems = []
    for member in documented:
        if not member.docstring and needs_docstring(member):
            problems.append(f"{member.fullname} has no docstring")
        arguments = arguments_of(member)
        for name in _REFERENCE.findall(member.docstring):
            if name.removeprefix("cellmesh.") not in known | arguments:
                problems.append(f"{member.fullname}: `{name}` is not in the reference")
        if isinstance(member, pdoc.doc.Function):
            for described in _ARGUMENTS.findall(member.docstring + "\n"):
                for name in set(_ARGUMENT.findall(described)) - arguments:
                    problems.append(f"{member.fullname} takes no argument {name}")
    return sorted(set(problems))


def main(target: Path) -> int:
    warnings.simplefilter("error")
    # pdoc evaluates annotations in the class's own scope, where `Results.list` hides `list`.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    problems = find_problems(load(PUBLIC))
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("cellmesh", r"!cellmesh\..+", *list(PUBLIC)[1:], output_directory=target)
    print(f"wrote {target}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
