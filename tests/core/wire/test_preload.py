"""The list of a project's modules: learned, bounded, forgotten, and never trusted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cellmesh.wire import preload
from cellmesh.wire.preload import (
    MAX_MODULES,
    Preloads,
    change_preloads,
    is_found_installed,
    is_installed,
    learn,
    leave_out,
    list_path,
    names_to_import,
    read_preloads,
)
from cellmesh.wire.ticket import runtime_root


def names_of(preloads: Preloads) -> tuple[str, ...]:
    return names_to_import(preloads, preloads.modules)


def test_the_slowest_modules_are_kept_in_the_order_of_their_imports() -> None:
    many = {f"m{i}": (i % 7 + 1) / 1000 + i * 1e-6 for i in range(2 * MAX_MODULES)}
    names = names_of(learn(Preloads(), "here", many))
    assert len(names) == MAX_MODULES
    assert names == tuple(name for name in many if name in names)
    assert min(many[name] for name in names) >= max(v for n, v in many.items() if n not in names)


def test_a_module_is_left_out_until_its_package_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_ours.py"
    package.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("package_of_ours", "package_of_ours.part", "package_of_ours_too")
    found = leave_out(learn(Preloads(), "", dict.fromkeys(names, 1.0)), "package_of_ours", "x")
    assert names_of(found) == names[2:]
    os.utime(package, ns=(5, 5))
    assert names_of(found) == names


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"modules": 3}', b"\xff", b'{"modules": {"a": "b"}}']
)
def test_a_list_that_is_none_is_empty_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(content)
    path.chmod(0o600)
    assert read_preloads(path) == Preloads()
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}))
    assert names_of(read_preloads(path)) == ("a",)


def test_a_list_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}))
    path.chmod(0o666)
    assert read_preloads(path) == Preloads()


@pytest.mark.parametrize("way", ["others may write", "is a link"])
def test_nothing_is_written_to_a_directory_that_is_not_the_users_alone(
    tmp_path: Path, way: str
) -> None:
    own, places, path = tmp_path / "own", tmp_path / "real", tmp_path / "real" / "list.json"
    own.write_text("precious")
    places.mkdir(mode=0o700)
    path.with_suffix(".new").symlink_to(own)
    if way == "is a link":
        (tmp_path / "link").symlink_to(places)
        path = tmp_path / "link" / "list.json"
    else:
        places.chmod(0o777)
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}))
    assert own.read_text() == "precious"
    assert not path.exists()


def test_under_tmp_each_user_has_lists_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", f"/{'long' * 30}")
    assert str(os.getuid()) in list_path("/a").parent.name


def test_nothing_is_learned_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "list.json"
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}))
    assert read_preloads(path) == Preloads()


def test_of_notebooks_that_write_at_once_one_does(tmp_path: Path) -> None:
    path = tmp_path / "preload" / "list.json"

    def write_within(found: Preloads) -> Preloads:
        change_preloads(path, lambda found: learn(found, "p", {"b": 1.0}))
        return learn(found, "p", {"a": 1.0})

    change_preloads(path, write_within)
    assert names_of(read_preloads(path)) == ("a",)
    change_preloads(path, lambda found: learn(found, "p", {"b": 1.0}))
    assert names_of(read_preloads(path)) == ("a", "b")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_each_project_interpreter_and_torch_has_a_list_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    paths = {list_path("/a"), list_path("/b")}
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    paths.add(list_path("/a"))
    torch = tmp_path / "torch.py"
    torch.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    paths.add(list_path("/a"))
    os.utime(torch, ns=(5, 5))
    paths.add(list_path("/a"))
    assert len(paths) == 5
    assert {path.parent.parent for path in paths} == {runtime_root().parent}


def test_an_editable_install_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, own = tmp_path / "site-packages", tmp_path / "src"
    for package in (installed / "bought", own / "written"):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    (installed / "written").symlink_to(own / "written")
    monkeypatch.syspath_prepend(str(installed))
    found = {name: is_found_installed(name) for name in ("bought", "written", "no_such_one")}
    assert found == {"bought": True, "written": False, "no_such_one": False}
    assert not is_installed(str(installed / "written" / "__init__.py"))
    assert preload.stamp_of("no_such_one") == 0
