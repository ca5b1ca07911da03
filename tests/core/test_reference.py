"""`make docs`: the API reference, and what it refuses."""

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULE = '''
"""A module."""

__all__ = ["documented", "Thing"]


def documented(a):
    """Do as `Thing` does, or `Thing.go`.

    Args:
        a: taken.
        b: not taken, unlike `a`.
    """


class Thing:
    """Goes by `Thing.gone`."""

    field: int

    def go(self): ...

    @property
    def bare(self): ...

    def _private(self): ...
'''


def test_reference_of_public_names_is_written(tmp_path):
    command = [sys.executable, "-m", "docs.reference", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'id="Mesh.heal"' in (tmp_path / "cellmesh.html").read_text()
    assert 'id="Ranks.submit_cell"' in (tmp_path / "cellmesh/controller/ranks.html").read_text()


def test_reference_names_what_docstrings_lack(tmp_path, monkeypatch):
    reference = importlib.import_module("docs.reference")  # pdoc takes a second to import
    (tmp_path / "poorly_documented.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert reference.find_problems(reference.load({"poorly_documented": ()})) == [
        "poorly_documented.Thing.bare has no docstring",
        "poorly_documented.Thing.go has no docstring",
        "poorly_documented.Thing: `Thing.gone` is not in the reference",
        "poorly_documented.documented takes no argument b",
    ]
