"""What a failed command means and what to type next, from what OpenSSH, sh and Python print."""

from __future__ import annotations

import pytest

from cellmesh.controller.session.launch.host_failure import explain

PYTHON = "/opt/env/bin/python"


@pytest.mark.parametrize(
    ("status", "said", "text", "remedy"),
    [
        (
            255,
            "ssh: Could not resolve hostname b: Name or service not known",
            "does not resolve",
            "`ssh b true` must work",
        ),
        (255, "Host key verification failed.", "key is not known", "`ssh b`"),
        (
            255,
            "root@b: Permission denied (publickey,password).",
            "refuses your key",
            "ssh-copy-id b",
        ),
        (255, "ssh: connect to host b port 22: Connection refused", "nothing listens", "sshd"),
        (255, "ssh: connect to host b port 22: Connection timed out", "not reached", "firewall"),
        (
            1,
            f"{PYTHON}: No module named cellmesh",
            "no cellmesh",
            f"`{PYTHON} -m pip install cellmesh`",
        ),
        (1, "ModuleNotFoundError: No module named 'zmq'", "lacks a package", "pip install zmq"),
        (1, "OSError: [Errno 28] No space left on device", "disk is full", "free some space on b"),
        (127, f"sh: 1: exec: {PYTHON}: not found", "Python is not there", "installed on b"),
        (127, "", "Python is not there", "installed on b"),
        (5, "refused by the engine", "ssh exited with 5", "by hand"),
    ],
)
def test_failure_says_what_is_wrong_and_what_mends_it(
    status: int, said: str, text: str, remedy: str
) -> None:
    failure = explain("b", "ssh", PYTHON, status, said)
    assert text in failure.text
    assert remedy in failure.remedy
    sentence = failure.describe("b")
    assert sentence.startswith("b: ")
    assert said in sentence
    assert f"exited with {status}" in sentence
