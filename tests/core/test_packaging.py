"""The wheel, installed into an environment that has nothing else of cellmesh; and the sdist."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import cellmesh

ROOT = Path(__file__).parents[2]
UPLOT = Path("magics/views/vendor/uplot")

USE = """
import importlib.metadata, pathlib, sys
import cellmesh
from IPython.core.interactiveshell import InteractiveShell

assert pathlib.Path(cellmesh.__file__).is_relative_to(sys.prefix), cellmesh.__file__
assert importlib.metadata.version("cellmesh") == cellmesh.__version__
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "cellmesh")
assert "dist_start" in shell.magics_manager.magics["line"]
shell.run_line_magic("unload_ext", "cellmesh")
import cellmesh.magics.views.plot.plot
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("dist"), "wheel", "sdist")


def build(source, target, *kinds):
    command = [sys.executable, "-m", "hatchling", "build", "-d", target]
    targets = [word for kind in kinds for word in ("-t", kind)]
    subprocess.run([*command, *targets], cwd=source, check=True, capture_output=True)
    return {path.suffix: path for path in target.iterdir()}


def install(package, prefix):
    """A virtual environment with `package`, and with this one's dependencies but its cellmesh.

    A `.pth` file adds site-packages as a folder, so that the `.pth` file of the editable install
    in it is not read.
    """
    venv.create(prefix, with_pip=False, symlinks=True)
    python = prefix / "bin/python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = prefix / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", python, "--no-cache"]
    alone = ["--offline", "--no-deps", "--reinstall"]
    subprocess.run([*command, *alone, package], check=True, capture_output=True, text=True)
    return site / "cellmesh"


def browser_files(folder):
    """JavaScript, CSS, and what names the version and the licence of vendored files."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.suffix in (".js", ".css") or path.name in ("LICENSE", "README.md", "py.typed")
    }


def test_installed_package_is_whole(built, tmp_path):
    package = install(built[".whl"], tmp_path / "environment")
    assert browser_files(package) == browser_files(ROOT / "cellmesh")
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    environment.pop("PYTHONPATH", None)
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    binaries = tmp_path / "environment/bin"
    used = subprocess.run([binaries / "python", "-c", USE], **run)
    assert used.returncode == 0, used.stderr
    program = subprocess.run([binaries / "cellmesh", "--version"], **run)
    assert cellmesh.__version__ in program.stdout, program.stderr


def test_sdist_gives_the_same_wheel(built, tmp_path):
    with tarfile.open(built[".gz"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    wheel = build(source, tmp_path, "wheel")[".whl"]
    assert contents(wheel) == contents(built[".whl"])


def contents(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_wheel_has_version_and_licences(built):
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = wheel.read(metadata).decode()
    info = metadata.removesuffix("METADATA")
    assert f"\nVersion: {cellmesh.__version__}\n" in text
    assert "\nLicense-Expression: BSD-3-Clause\n" in text
    assert f"{info}licenses/LICENSE" in names
    assert f"{info}licenses/cellmesh/{UPLOT}/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
