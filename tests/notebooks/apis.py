"""Writes docs/apis.md, by ``python -m tests.notebooks.apis``: which notebook shows which API of
PyTorch Distributed, and what was run on what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat

from tests.notebooks.catalogue import (
    LEFT_OUT,
    OVERVIEW_DATE,
    OVERVIEW_URL,
    PUBLIC_MODULES,
    SECTIONS,
    Api,
    Section,
)
from tests.notebooks.reading import How, Uses, canonical, find, origin, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "apis.md"
ON_CPU = {
    How.RUN: "run",
    How.REFUSED: "refused here, shown with its error",
    How.GPU: "needs a GPU, not run",
    How.NOT_RUN: "not run",
    None: "–",
}


def where(api: Api, section: Section, notebooks: Mapping[str, Uses]) -> dict[str, How]:
    """Return the notebooks that use an API of a section, and how.

    A method counts by its name, in a notebook that uses something else of its section.
    """
    wanted = canonical(api.path)
    family = {canonical(other.path) for other in section.apis if not other.is_method}
    found = {}
    for name, uses in notebooks.items():
        how = uses.canonical.get(wanted)
        if how is None and api.is_method and not family.isdisjoint(uses.canonical):
            how = uses.methods.get(api.path.rpartition(".")[2])
        if how is not None:
            found[name] = how
    return found


def load() -> dict[str, Uses]:
    """Read each notebook, in the order of their names."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {path.name: read(nbformat.read(path, as_version=4)) for path in paths}


def without_notebook(notebooks: Mapping[str, Uses]) -> list[str]:
    """The APIs that no notebook shows, and of which the catalogue does not say why."""
    return [
        api.path
        for section in SECTIONS
        for api in section.apis
        if not api.reason and not where(api, section, notebooks)
    ]


def public_names(module: str) -> list[str]:
    """The names that a module means for others: its ``__all__``, or else what it has of
    torch.distributed.
    """
    thing = find(module)
    listed = getattr(thing, "__all__", None)
    if listed is not None:
        return sorted(name for name in set(listed) if find(f"{module}.{name}") is not None)
    origins = {
        name: origin(value) for name, value in vars(thing).items() if not name.startswith("_")
    }
    return sorted(
        name for name, at in origins.items() if at and at[0].startswith("torch.distributed")
    )


def unlisted() -> list[str]:
    """The public names that are neither in the catalogue nor left out with a reason."""
    known = {canonical(api.path) for section in SECTIONS for api in section.apis}
    known |= {canonical(f"{out.module}.{name}") for out in LEFT_OUT for name in out.names}
    names = [f"{module}.{name}" for module in PUBLIC_MODULES for name in public_names(module)]
    return [name for name in names if canonical(name) not in known]


HEAD = f"""\
# PyTorch Distributed, API by API

<!-- Written by `python -m tests.notebooks.apis`; a test compares. -->

This page lists the APIs of the [Distributed Overview]({OVERVIEW_URL}) (updated on \
{OVERVIEW_DATE}), of the pages that the overview links to, and of the tutorials, each with the \
notebooks that use it.

- **CPU, gloo**: on 2 to 8 ranks on one machine.
  - *run*: the tests execute a cell that uses the API, and the cell succeeds.
  - *run, with a part of the notebook's own*: torch alone does not support it on a CPU; the \
notebook adds the missing part.
  - *refused here*: a notebook shows the error that torch raises.
  - *needs a GPU*: in a cell for GPUs only, which has not been run.
- **GPU, NCCL**: the notebooks support GPUs, but have not been run on GPUs yet.

The page is generated from the notebooks' code: names are resolved through imports. A method \
counts by its name, in a notebook that also uses a function or class of the same section. Code in \
a `try` that catches errors does not count as run."""


def render(notebooks: Mapping[str, Uses]) -> str:
    """The page, as Markdown."""
    return "\n".join((HEAD, *_lines(notebooks)))


def _lines(notebooks: Mapping[str, Uses]) -> Iterator[str]:
    found = {api: where(api, section, notebooks) for section in SECTIONS for api in section.apis}
    best = {api: max(uses.values(), default=None) for api, uses in found.items()}
    num_shown = sum(how is not None for how in best.values())
    num_run = sum(how is How.RUN for how in best.values())
    yield ""
    yield f"{len(found)} APIs; {num_shown} are in notebooks, {num_run} of them run on CPU."
    yield "[The last section](#left-out) lists the other public names of torch.distributed."
    for section in SECTIONS:
        remark = f". {section.remark}" if section.remark else ""
        yield f"\n## {section.title}\n\n[Reference]({section.url}){remark}\n"
        yield "| API | notebooks | CPU, gloo | GPU, NCCL |\n|---|---|---|---|"
        for api in section.apis:
            shown_in = (
                ", ".join(f"[{name[:2]}]" for name in found[api])
                or f"not in a notebook: {api.reason or '?'}"
            )
            on_gpu = "–" if best[api] is None else "not run"
            yield f"| `{api.shown}` | {shown_in} | {_on_cpu(best[api], api)} | {on_gpu} |"
    yield from _lines_of_left_out()
    yield ""
    for name in notebooks:
        yield f"[{name[:2]}]: ../notebooks/{name}"
    yield ""


def _lines_of_left_out() -> Iterator[str]:
    yield "\n## Left out\n"
    yield (
        "A test checks that each public name of these modules of the installed torch is listed "
        "on this page:"
    )
    yield ", ".join(f"`{module.removeprefix('torch.')}`" for module in PUBLIC_MODULES) + "."
    yield "\n| why | names |\n|---|---|"
    for reason in dict.fromkeys(out.reason for out in LEFT_OUT):
        alike = (out for out in LEFT_OUT if out.reason == reason)
        names = [
            f"`{out.module.removeprefix('torch.')}.{name}`" for out in alike for name in out.names
        ]
        yield f"| {reason} | {', '.join(names)} |"


def _on_cpu(best: How | None, api: Api) -> str:
    if best is How.RUN and api.own_part:
        return f"run, with a part of the notebook's own: {api.own_part}"
    return ON_CPU[best]


if __name__ == "__main__":
    PAGE.write_text(render(load()), encoding="utf-8")
