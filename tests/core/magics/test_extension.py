"""What the extension adds to a shell beside its magics."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from cellmesh.magics.extension import _propose_magic


@pytest.mark.parametrize(
    ("cell", "proposed"),
    [
        ("%dist_chek m", "did you mean `%dist_check`?\n"),
        ("%dist_pul x", "did you mean `%dist_pull`?\n"),
        ("%%dist_profil\nx", "did you mean `%%dist_profile`?\n"),
        ("%%dst\nx", "did you mean `%%dist`?\n"),
        ("%nothing_like_it", ""),
        ("1 / 0", ""),
        ("x = 1", ""),
    ],
)
def test_the_nearest_magic_is_proposed(
    cell: str, proposed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(HistoryManager={"enabled": False})
    result = InteractiveShell(config=config).run_cell(cell)
    capsys.readouterr()
    _propose_magic(result)
    assert capsys.readouterr().err == proposed
