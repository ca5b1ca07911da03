"""The options of %dist_start are documented."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from cellmesh.magics.options import START_OPTIONS

USAGE = (Path(__file__).parents[3] / "docs/usage.md").read_text()


@pytest.mark.parametrize(
    "name", [each.opts[0] for each in START_OPTIONS if isinstance(each, click.Option)]
)
def test_option_stands_in_the_table_of_the_usage(name: str) -> None:
    table = USAGE.partition("| option of `%dist_start` |")[2].partition("\n\n")[0]
    assert f"`{name}" in table
