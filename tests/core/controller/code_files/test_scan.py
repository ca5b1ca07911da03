"""Which files beside the notebook an import can reach, and which of them are left out."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import cellmesh
from cellmesh.controller.code_files.scan import Found, Scanner, user_roots

OLD_NS = 1_000_000_000_000_000_000


def write(directory: Path, *names: str, text: str = "") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def paths_of(scan: Found) -> list[str]:
    return sorted(path for _, path in scan.files)


def found(scanner: Scanner) -> list[str]:
    return paths_of(scanner.scan())


def test_what_an_import_can_reach_is_found(tmp_path: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    reached = [
        *("module.py", "names/space.py", "package/__init__.py", f"compiled{suffix}"),
        *("package/data.json", "package/data-files/table.csv"),
    ]
    write(
        tmp_path,
        *reached,
        *("notebook.ipynb", "data.csv", "no-name/module.py", ".hidden/module.py", ".hidden.py"),
        *("__pycache__/module.py", "package/__pycache__/x.pyc", "package/x.pyc"),
        *("venv/pyvenv.cfg", "venv/module.py", "lib/site-packages/module.py"),
    )
    assert found(Scanner((str(tmp_path),))) == sorted(reached)
    assert found(Scanner((str(tmp_path / "nowhere"), str(tmp_path / "module.py")))) == []


def test_gitignore_is_honoured_above_and_below(tmp_path: Path) -> None:
    write(tmp_path, ".git/HEAD")
    write(tmp_path, ".gitignore", text="# a comment\n*_local.py\n!\nproject/build/\n")
    project = tmp_path / "project"
    write(project, "a.py", "a_local.py", "build/b.py", "inner/kept_local.py", "inner/c.py")
    write(project, "inner/.gitignore", text="!kept_local.py\n/c.py\n")
    scanner = Scanner((str(project),))
    assert found(scanner) == ["a.py", "inner/kept_local.py"]
    write(tmp_path, ".gitignore", text="a.py\n")
    assert found(scanner) == ["a_local.py", "build/b.py", "inner/kept_local.py"]
    (tmp_path / ".git/HEAD").unlink()
    (tmp_path / ".git").rmdir()
    assert "a.py" in found(scanner), "outside of a working tree it means nothing"


def test_changes_are_seen_where_a_directory_was_listed_before(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "package/__init__.py")
    for directory in (tmp_path, tmp_path / "package"):
        os.utime(directory, ns=(OLD_NS, OLD_NS))  # long enough ago to be trusted
    scanner = Scanner((str(tmp_path),))
    before = scanner.scan().files
    assert scanner.scan().files == before
    write(tmp_path, "a.py", text="changed")
    assert scanner.scan().files[0, "a.py"].num_bytes == 7
    write(tmp_path, "package/b.py")
    (tmp_path / "package/__init__.py").unlink()
    assert found(scanner) == ["a.py", "package/b.py"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/package/__init__.py", "elsewhere/one.py")
    root = tmp_path / "root"
    root.mkdir()
    (root / "package").symlink_to(tmp_path / "elsewhere/package")
    (root / "one.py").symlink_to(tmp_path / "elsewhere/one.py")
    (root / "circle").symlink_to(root)
    (root / "nowhere.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(root / "pipe.py")
    assert found(Scanner((str(root),))) == ["one.py", "package/__init__.py"]


def test_scan_that_reaches_its_bound_says_so_and_forgets_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.py", "deep/c.py", "deep/deeper/d.py")
    scanner = Scanner((str(tmp_path),))
    every = scanner.scan().files
    scanner.max_scan_s = -1.0
    cut = scanner.scan()
    assert cut.files == every
    assert cut.left_out.startswith(f"{tmp_path}: a scan ends after")
    few = Scanner((str(tmp_path),), max_files=2).scan()
    assert paths_of(few) == ["a.py", "b.py"]
    assert few.left_out.startswith(f"{tmp_path}/deep: a scan ends after 2 files")


def test_large_files_are_left_out_and_a_scan_ends_after_so_many_bytes(tmp_path: Path) -> None:
    write(tmp_path, "p/__init__.py", "p/data.bin", "p/deep/more.bin", text="12345")
    write(tmp_path, "p/large.bin", text="1" * 2_000_000)
    scanner = Scanner((str(tmp_path),), max_bytes=12, max_file_bytes=1_000_000)
    scan = scanner.scan()
    assert paths_of(scan) == ["p/__init__.py", "p/data.bin", "p/deep/more.bin"]
    assert scan.problems == (f"{tmp_path}/p/large.bin: it has more than 1 MB",)
    scan = Scanner((str(tmp_path),), max_bytes=10, max_file_bytes=1_000_000).scan()
    assert paths_of(scan) == ["p/__init__.py", "p/data.bin"]
    assert scan.left_out.startswith(f"{tmp_path}/p/deep: a scan ends after 10000 files, 0 MB")


def test_roots_are_the_users_directories(tmp_path: Path) -> None:
    installed = tmp_path / "lib/site-packages"
    installed.mkdir(parents=True)
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    path = [str(tmp_path), "/", str(tmp_path / "nowhere"), str(installed), *python, str(tmp_path)]
    assert user_roots(path) == (str(tmp_path),)
    own = Scanner((str(Path(cellmesh.__file__).parents[1]),)).scan().files
    assert not [name for _, name in own if name.startswith("cellmesh/")]


def test_entry_that_cannot_be_looked_at_is_named_and_the_rest_is_found(tmp_path: Path) -> None:
    names = ["module.py", "package/__init__.py", "package/inner/x.py"]
    write(tmp_path, *names)
    for link in ("circle", "package/circle.json", "not-reachable"):
        (tmp_path / link).symlink_to(Path(link).name)
    os.utime(tmp_path, ns=(OLD_NS, OLD_NS))
    scanner, why = Scanner((str(tmp_path),)), "Too many levels of symbolic links"
    circles = (f"{tmp_path}/circle", f"{tmp_path}/package/circle.json")
    for _ in range(2):
        scan = scanner.scan()
        assert paths_of(scan) == names
        assert scan.problems == tuple(f"{circle}: {why}" for circle in circles)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_unreadable_gitignore_hides_nothing(make: Any, tmp_path: Path) -> None:
    write(tmp_path, "module.py", ".git/HEAD")
    make(tmp_path / ".gitignore")
    scan = Scanner((str(tmp_path),)).scan()
    assert paths_of(scan) == ["module.py"]
