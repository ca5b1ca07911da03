"""A mesh's keys are in no traceback that shows the variables of all frames (``%xmode Verbose``)."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import cellmesh as cm
from cellmesh.wire.curve import KeyPair, new_keys
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import new_key, runtime_root
from tests.conftest import check_nothing_left, own_runtime_dir
from tests.faults.watching import wait_until
from tests.support.lent_agent import ENGINE

WAIT_S = 60.0
PACKAGE = str(Path(cm.__file__).parent)
TOKEN = "a-token-that-the-notebook-passes-on"
HERE = {"hosts": "a:1,b:1", "launch": ENGINE, "lease_s": 60, "env": ["CM_TOKEN"]}
HAND = {"launch": "hand", "nodes": 1, "nproc_per_host": 2, "address": "127.0.0.1", "timeout_s": 60}
# Nothing can be raised there once these have a key: an error that has it is raised without frames.
BRIEF = {"/wire/codec.py:encode:frames", "/wire/own_file.py:_as_secret:value"}
AGENT = [sys.executable, "-m", "cellmesh", "agent", "--ticket"]
# What raises, and what is called then: each frame on the way there is shown.
LAUNCH = "cellmesh.controller.session.launch."
STANDING = "cellmesh.controller.session.standing."
FAILING_STARTS = [
    ("cellmesh.wire.ticket.write_whole", "cm.start(2)"),
    ("cellmesh.wire.own_file.to_json", "cm.start(**HERE)"),
    (LAUNCH + "commands.to_json", "cm.start(**HERE)"),
    (LAUNCH + "commands._write", "cm.start(**HERE)"),
    (
        LAUNCH + "commands._write_file",
        "cm.start(**{**HERE, 'launch': HERE['launch'] + ' {ticket}'})",
    ),
    (LAUNCH + "commands.HostCommands._hear", "cm.start(**HERE)"),
    (LAUNCH + "hosts.public_of", "cm.start(**HERE)"),
    (LAUNCH + "hosts.check_hosts", "cm.start(**HERE)"),
    (STANDING + "transport.hear_connection", "cm.start(**HERE)"),
    (STANDING + "transport.connect_dealer", "cm.start(**HERE)"),
    (LAUNCH + "invited_hosts.to_json", "cm.start(**HAND)"),
    (LAUNCH + "invited_hosts.choose_guests", "cm.start(**HAND)"),
]
FAILING_ATTACHES = [
    ("cellmesh.wire.ticket.own_version", "cm.attach('far')"),
    (STANDING + "encode", "cm.attach('far')"),
    (STANDING + "zmq.Poller", "cm.attach('far')"),
    (STANDING + "transport.connect_dealer", "cm.attach('far')"),
    (STANDING + "transport.hear_connection", "cm.attach('far')"),
    (STANDING + "transport.send", "cm.attach('far')"),
]


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The secrets that are made during a test."""
    made = {TOKEN}
    monkeypatch.setenv("CM_TOKEN", TOKEN)

    def record_key() -> Secret:
        made.add(key := new_key())
        return key

    def record_keys() -> KeyPair:
        made.add((keys := new_keys()).secret)
        return keys

    monkeypatch.setattr(LAUNCH + "local.new_key", record_key)
    monkeypatch.setattr(LAUNCH + "hosts.new_keys", record_keys)
    monkeypatch.setattr(LAUNCH + "invited_hosts.new_keys", record_keys)
    with own_runtime_dir() as directory:
        yield made
        check_nothing_left(directory)


def forms_of(secrets: set[str]) -> list[str]:
    """How secrets may be shown: also a part of one, or as bytes."""
    forms = []
    for secret in secrets - {""}:
        forms += [secret[at : at + 12] for at in range(len(secret) - 11)]
        if re.fullmatch("[0-9a-f]{64}", secret):
            forms += [repr(bytes.fromhex(secret)[at : at + 8])[2:-1] for at in range(25)]
    return forms


def find_shown(text: str, secrets: set[str]) -> list[str]:
    return [form for form in forms_of(secrets) if form in text]


def fail(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def run_cell(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a cell in IPython with verbose tracebacks; return what it shows."""
    config = Config({"HistoryManager": {"enabled": False}})
    shell = InteractiveShell(config=config, user_ns={"cm": cm, "HERE": HERE, "HAND": HAND})
    shell.run_line_magic("xmode", "Verbose")
    capsys.readouterr()
    shell.run_cell(code)
    shown = capsys.readouterr()
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.out + shown.err)


@pytest.mark.parametrize(("place", "code"), FAILING_STARTS, ids=[at for at, _ in FAILING_STARTS])
def test_failing_start_shows_no_secret(
    place: str,
    code: str,
    secrets: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(place, fail)
    shown = run_cell(code, capsys)
    assert "KeyboardInterrupt" in shown
    assert "options=Options(" in shown  # variables are shown
    assert len(secrets) > 1
    assert find_shown(shown, secrets) == []


def test_failing_attach_shows_no_secret(
    secrets: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = cm.start(**HERE, name="far")
    mesh.detach()
    for place, code in FAILING_ATTACHES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, fail)
            shown = run_cell(code, capsys)
        assert "KeyboardInterrupt" in shown, place
        assert "path=" in shown or "ticket=" in shown, place
        assert find_shown(shown, secrets) == [], place
    cm.attach("far").stop()


class Variables:
    """Keeps how the variables of every function of cellmesh look when it returns."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}
        self._busy = threading.local()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code: CodeType = frame.f_code
        is_ours = event == "return" and code.co_filename.startswith(PACKAGE)
        if not is_ours or getattr(self._busy, "is_set", False):
            return
        self._busy.is_set = True
        try:
            where = f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"
            for name, value in frame.f_locals.items():
                texts = self.seen.setdefault(f"{where}:{name}", set())
                if len(texts) < 300:
                    texts.add(_safe_repr(value))
        finally:
            self._busy.is_set = False

    def find(self, secrets: set[str]) -> set[str]:
        forms = set(forms_of(secrets - {TOKEN}))  # the notebook's environment is its own
        # Most functions have the same objects: all texts are searched at once, each of them once.
        everything = "\0".join(set().union(*self.seen.values()))
        if not (forms := {form for form in forms if form in everything}):
            return set()
        return {
            where
            for where, texts in self.seen.items()
            if where not in BRIEF and any(form in text for text in texts for form in forms)
        }


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)[:20_000]
    except Exception:  # it is not made yet
        return ""


@pytest.fixture
def variables() -> Iterator[Variables]:
    seen = Variables()
    threading.setprofile(seen)
    sys.setprofile(seen)
    yield seen
    sys.setprofile(None)
    threading.setprofile(None)


def test_no_variable_shows_a_secret_of_a_mesh_on_one_host(
    secrets: set[str], variables: Variables
) -> None:
    mesh = cm.start(1, lease_s=60, name="near", env=HERE["env"])
    mesh.cell("x = rank")
    mesh.detach()
    cm.attach("near").stop()
    assert any("Connection.__init__" in where for where in variables.seen)
    assert variables.find(secrets) == set()


def test_no_variable_shows_a_secret_of_a_mesh_on_many_hosts(
    secrets: set[str], variables: Variables
) -> None:
    mesh = cm.start(**HERE, name="far")
    mesh.cell("x = rank")
    mesh.detach()
    cm.attach("far").stop()
    assert any("HostCommands._run" in where for where in variables.seen)
    assert any("ask_at" in where for where in variables.seen)
    assert variables.find(secrets) == set()


def test_no_variable_shows_a_secret_of_hosts_that_announce_themselves(
    secrets: set[str], variables: Variables
) -> None:
    agents: list[subprocess.Popen[bytes]] = []

    def start_agent() -> None:
        path = runtime_root() / "far/join.json"
        wait_until(lambda: path.exists() and path.stat().st_size > 0, WAIT_S, "it is written")
        agents.append(subprocess.Popen([*AGENT, str(path)]))

    thread = threading.Thread(target=start_agent)
    thread.start()
    cm.start(**HAND, name="far").stop()
    thread.join()
    agents[0].wait(WAIT_S)
    assert any("Listener.give" in where for where in variables.seen)
    assert variables.find(secrets) == set()
