"""Make environments of the lowest and of the newest Python, torch and dependencies that are
promised, and run a selection of the tests in each. What is promised besides lies between these two.

Each environment is made while the tests run in the one before, and removed after its own: with
torch for CUDA each is 5 GB. Libraries come from the package index; nothing of the environment that
this runs in is used, uv aside, which makes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SELECTION = "tests/compat/selection.txt"
REPORTS = ROOT / "artifacts" / "compat"
# What the selected tests use beside what cellmesh needs; always the newest.
TOOLS = (
    "hypothesis",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "pandas",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "tqdm",
)


@dataclass(frozen=True)
class Environment:
    """One end of the versions that are promised to work.

    Attributes:
        python: version of Python.
        torch: its requirement.
        resolution: which versions of the dependencies that ``pyproject.toml`` declares.
    """

    python: str
    torch: str
    resolution: str

    def __str__(self) -> str:
        return f"Python {self.python}, {self.torch}, {self.resolution} dependencies"


ENVIRONMENTS = (
    Environment("3.11", "torch==2.11.0", "lowest-direct"),
    Environment("3.13", "torch", "highest"),
)


def find_python(version: str) -> str:
    """An interpreter of that version: on the path, or one that pyenv has installed.

    Raises:
        SystemExit: there is none.
    """
    candidates = [f"python{version}"]
    if shutil.which("pyenv"):
        root = subprocess.run(
            ["pyenv", "root"], capture_output=True, text=True, check=True
        ).stdout.strip()
        candidates += [
            str(path) for path in Path(root, "versions").glob(f"{version}.*/bin/python{version}")
        ]
    for candidate in candidates:
        if shutil.which(candidate) is None:
            continue
        # pyenv puts a command on the path for each of its versions, also for those that are not in
        # use.
        asked = subprocess.run(
            [candidate, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
        )
        if asked.returncode == 0:
            return asked.stdout.strip()
    sys.exit(
        f"there is no Python {version} here: `pyenv install {version}`, or have python{version} "
        "on the path"
    )


def install(environment: Environment) -> tuple[tempfile.TemporaryDirectory[str], Path, float]:
    """Make an environment; returns its directory, its interpreter, and how long that took."""
    began_s = time.monotonic()
    made = tempfile.TemporaryDirectory(prefix="compat-")
    directory = Path(made.name)
    uv = [sys.executable, "-m", "uv", "--quiet"]
    settings = {
        "UV_CACHE_DIR": str(directory / "cache"),
        **os.environ,
        "UV_PYTHON_DOWNLOADS": "never",
    }
    python = directory / "env" / "bin" / "python"

    def run(*words: str) -> None:
        subprocess.run([*uv, *words], cwd=ROOT, env=settings, check=True)

    run("venv", "--python", find_python(environment.python), str(directory / "env"))
    into = ("pip", "install", "--python", str(python))
    run(*into, "--resolution", environment.resolution, "--editable", ".", environment.torch)
    run(*into, *TOOLS)
    subprocess.run(
        [python, "-m", "ipykernel", "install", "--sys-prefix", "--name", "python3"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return made, python, time.monotonic() - began_s


def run_tests(environment: Environment, python: Path) -> str:
    """Run the selection; returns what is wrong, "" if nothing is. A test that was skipped is no
    pass.
    """
    report = REPORTS / f"{environment.python}.xml"
    report.unlink(missing_ok=True)
    tests = subprocess.run(
        [python, "-m", "pytest", f"@{SELECTION}", "-q", "-p", "no:cacheprovider",
         f"--junitxml={report}",
         "--numprocesses=2", "--dist=loadfile",
         # Of old versions of jupyter_core, and of torch.compile on Python 3.13.0.
         "-W", "ignore:Jupyter is migrating:DeprecationWarning",
         "-W", "ignore:Guards may run slower:RuntimeWarning"],
        cwd=ROOT,
    )  # fmt: skip
    if not report.exists():
        return "no test has run"
    suite = ElementTree.parse(report).getroot()[0]
    if tests.returncode or int(suite.get("skipped", 0)):
        return (
            f"pytest ended with {tests.returncode}: {suite.get('failures')} failed, "
            f"{suite.get('errors')} errors, {suite.get('skipped')} skipped"
        )
    return ""


def main() -> None:
    """Run all environments, or those of the Python versions that are given."""
    wanted = [each for each in ENVIRONMENTS if not sys.argv[1:] or each.python in sys.argv[1:]]
    for environment in wanted:
        find_python(environment.python)  # before anything is installed
    lines, problems = [], []
    with ThreadPoolExecutor(1) as installing:
        coming = [installing.submit(install, environment) for environment in wanted]
        for environment, installed in zip(wanted, coming, strict=True):
            directory, python, installed_s = installed.result()
            began_s = time.monotonic()
            with directory:
                problem = run_tests(environment, python)
            problems += [problem] * bool(problem)
            took_s = time.monotonic() - began_s
            lines.append(
                f"{environment}: {problem or 'ok'} ({took_s:.0f} s, after {installed_s:.0f} s to "
                "install)"
            )
    print("\n".join(lines))
    if problems or not lines:
        sys.exit(
            "make compat: " + ("; ".join(problems) or f"no such Python: {' '.join(sys.argv[1:])}")
        )


if __name__ == "__main__":
    main()
