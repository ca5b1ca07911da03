"""Reads `catalogue.toml`: the APIs of PyTorch Distributed that docs/apis.md lists, and those that
it does not list, with the reasons.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Modules whose names say too little alone.
_TOLD_WITH_NAMES = ("autograd", "_symmetric_memory", "_functional_collectives")


@dataclass(frozen=True)
class Api:
    """One name."""

    path: str  # dotted; a method ends in ``Class.method``
    reason: str = ""  # why no notebook shows it; "" if one has to
    is_method: bool = False  # it is called on an instance, whose class is not in the code
    own_part: str = ""  # added by a notebook, without which torch refuses to run it on a CPU
    title: str = ""  # its name on the page; by default the end of its path

    @property
    def shown(self) -> str:
        """The name as the page writes it."""
        if self.title:
            return self.title
        owner, name = self.path.split(".")[-2:]
        return f"{owner}.{name}" if owner[0].isupper() or owner in _TOLD_WITH_NAMES else name


@dataclass(frozen=True)
class Section:
    """The names of one page."""

    title: str
    url: str
    apis: tuple[Api, ...]
    remark: str = ""


@dataclass(frozen=True)
class LeftOut:
    """Names of a module that the catalogue does without, and why."""

    reason: str
    module: str
    names: tuple[str, ...]


def _section(title: str, url: str, groups: list[dict[str, Any]], remark: str = "") -> Section:
    apis = [
        Api(f"{group['of']}.{name}", **{k: v for k, v in group.items() if k not in ("of", "names")})
        for group in groups
        for name in group["names"].split()
    ]
    return Section(title, url, tuple(apis), remark)


_TOML = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OVERVIEW_URL, OVERVIEW_DATE = _TOML["overview_url"], _TOML["overview_date"]
PUBLIC_MODULES = tuple(_TOML["public_modules"].split())
SECTIONS = tuple(_section(**section) for section in _TOML["sections"])
LEFT_OUT = tuple(
    LeftOut(left_out["reason"], group["of"], tuple(group["names"].split()))
    for left_out in _TOML["left_out"]
    for group in left_out["groups"]
)
