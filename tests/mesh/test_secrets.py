"""A mesh's keys are in no traceback that shows the variables of all frames (``%xmode Verbose``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import cellmesh as cm
from cellmesh.wire.curve import KeyPair, new_keys
from cellmesh.wire.own_file import Secret
from cellmesh.wire.ticket import new_key
from tests.conftest import clean_runtime_dir
from tests.support.lent_agent import ENGINE

TOKEN = "a-token-that-the-notebook-passes-on"
HERE = {"hosts": "a:1,b:1", "launch": ENGINE, "lease_s": 60, "env": ["CM_TOKEN"]}
HAND = {"launch": "hand", "nodes": 1, "nproc_per_host": 2, "address": "127.0.0.1", "timeout_s": 60}
# What raises, and what is called then: each frame on the way there is shown.
LAUNCH = "cellmesh.controller.session.launch."
STANDING = "cellmesh.controller.session.standing."
FAILING_STARTS = [
    ("cellmesh.wire.ticket.write_whole", "cm.start(2)"),
    (LAUNCH + "commands.to_json", "cm.start(**HERE)"),
    (LAUNCH + "commands._write", "cm.start(**HERE)"),
    (LAUNCH + "hosts.public_of", "cm.start(**HERE)"),
    (STANDING + "transport.connect_dealer", "cm.start(**HERE)"),
    (LAUNCH + "invited_hosts.choose_guests", "cm.start(**HAND)"),
]
FAILING_ATTACHES = [
    ("cellmesh.wire.ticket.own_version", "cm.attach('far')"),
    (STANDING + "transport.connect_dealer", "cm.attach('far')"),
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
    with clean_runtime_dir():
        yield made


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
    shell = InteractiveShell(
        config=config, user_ns={"cm": cm, "HERE": HERE, "HAND": HAND, "ENGINE": ENGINE}
    )
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
