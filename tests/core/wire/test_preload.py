"""The list of a project's modules: learned, bounded, forgotten, and never trusted."""

from __future__ import annotations

import os
import sys
import threading
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

DAY_S = 86400.0


def test_the_slowest_modules_are_kept_in_the_order_of_their_imports() -> None:
    many = {f"m{i}": (i % 7 + 1) / 1000 + i * 1e-6 for i in range(2 * MAX_MODULES)}
    found = learn(Preloads(), "here", many, 0.0)
    names = names_to_import(found, 1.0)
    assert len(names) == MAX_MODULES
    assert names == tuple(name for name in many if name in names)
    assert min(many[name] for name in names) >= max(v for n, v in many.items() if n not in names)


def test_a_module_is_learned_anew_after_a_month() -> None:
    found = learn(Preloads(), "here", {"old": 1.0}, 0.0)
    found = learn(found, "here", {"new": 1.0}, 20 * DAY_S)
    assert names_to_import(found, 29 * DAY_S) == ("old", "new")
    assert names_to_import(found, 31 * DAY_S) == ("new",)
    assert [each.name for each in learn(found, "here", {}, 31 * DAY_S).modules] == ["new"]


def test_a_module_is_left_out_until_its_package_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_ours.py"
    package.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = leave_out(learn(Preloads(), "", {"package_of_ours": 1.0}, 0.0), "package_of_ours", "x")
    assert names_to_import(found, 0.0) == ()
    os.utime(package, ns=(5, 5))
    assert names_to_import(found, 0.0) == ("package_of_ours",)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"modules": 3}', b"\xff", b'{"modules": [1]}']
)
def test_a_list_that_is_none_is_empty_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(content)
    path.chmod(0o600)
    assert read_preloads(path) == Preloads()
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}, 0.0))
    assert names_to_import(read_preloads(path), 0.0) == ("a",)


def test_a_list_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}, 0.0))
    path.chmod(0o666)
    assert read_preloads(path) == Preloads()


def test_nothing_is_learned_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "list.json"
    change_preloads(path, lambda found: learn(found, "p", {"a": 1.0}, 0.0))
    assert read_preloads(path) == Preloads()


def test_notebooks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "preload" / "list.json"

    def write(name: str) -> None:
        change_preloads(path, lambda found: learn(found, "p", {name: 1.0}, 0.0))

    threads = [threading.Thread(target=write, args=(f"m{i}",)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(names_to_import(read_preloads(path), 0.0)) == {f"m{i}" for i in range(16)}


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
    assert {path.parent.parent for path in paths} == {tmp_path}


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
