"""How findings are written."""

from __future__ import annotations

import re

import click
import pytest

from cellmesh.cli.doctor.checks import Finding, echo_findings


def test_findings_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    echo_findings(
        [
            Finding("memory", "ok", "16 GB"),
            Finding("/dev/shm", "warning", "64 MB", "`--shm-size=8g`"),
            Finding("loopback", "problem", "down", "`ip link set lo up`"),
        ]
    )
    assert capsys.readouterr().out == (
        "ok       memory    16 GB\n"
        "warning  /dev/shm  64 MB\n"
        "                   mend: `--shm-size=8g`\n"
        "problem  loopback  down\n"
        "                   mend: `ip link set lo up`\n"
        "\n"
        "1 problem, 1 warning\n"
    )


def test_findings_on_a_terminal_are_wrapped_and_coloured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    with click.Context(click.Command("doctor"), color=True):
        echo_findings([Finding("memory", "ok", "word " * 20)])
    out = capsys.readouterr().out
    assert "\x1b[32mok     \x1b[0m" in out
    plain = re.sub(r"\x1b\[\d+m", "", out).splitlines()
    assert max(map(len, plain)) <= 50
    assert plain[1].startswith(" " * 17 + "word")
    assert plain[-1] == "all is well"
