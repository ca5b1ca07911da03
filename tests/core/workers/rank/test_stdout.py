"""What a rank prints: bounded where it is shown, whole in its log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellmesh.wire.verbs import Output, Skipped
from cellmesh.workers.rank.stdout import (
    BURST_BYTES,
    BYTES_PER_S,
    SAMPLE_BYTES,
    TAIL_LINES,
    Gate,
    Log,
    read_log,
)

# ---- the gate


def text_of(shown: Sequence[Any]) -> str:
    return "".join(verb.text for verb in shown if isinstance(verb, Output))


def num_bytes(shown: Sequence[Any]) -> int:
    return len(text_of(shown).encode())


def skipped_in(shown: Sequence[Any]) -> list[Skipped]:
    return [verb for verb in shown if isinstance(verb, Skipped)]


def test_long_output_is_cut_at_a_line_and_counted() -> None:
    gate = Gate(0.0, burst_bytes=1000, bytes_per_s=0)
    text = "".join(f"line {n:4}\n" for n in range(2000))
    shown = gate.admit(1, "stdout", text, 0.0)
    assert text_of(shown).endswith("\n")
    assert text.startswith(text_of(shown))
    assert len(text_of(shown)) <= 1000
    note, tail = gate.close()
    assert text.endswith(tail.text)
    assert len(tail.text) <= SAMPLE_BYTES
    assert tail.text.count("\n") <= TAIL_LINES
    assert note.run == tail.run == 1
    assert note.num_bytes == len(text) - len(text_of(shown)) - len(tail.text)
    assert note.num_lines == 2000 - text_of(shown).count("\n") - tail.text.count("\n")


CHUNKS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(["stdout", "stderr"]),
        st.text(st.sampled_from("abü語\n\r\u2028"), min_size=1, max_size=80).map(lambda t: t * 20),
        st.sampled_from([0.0, 0.1, 5.0]),
    ),
    max_size=30,
)


@given(CHUNKS)
def test_shown_and_skipped_output_add_up(chunks: Sequence[Any]) -> None:
    gate, now = Gate(0.0, burst_bytes=2000, bytes_per_s=500), 0.0
    shown: list[Any] = []
    for run, stream, text, pause in chunks:
        now += pause
        shown += gate.admit(run, stream, text, now)
    shown += gate.close()
    for run in (1, 2, 3):
        written = "".join(text for r, _, text, _ in chunks if r == run)
        of_run = [verb for verb in shown if verb.run == run]
        notes = skipped_in(of_run)
        hidden_bytes, hidden_lines = (
            sum(getattr(note, name) for note in notes) for name in ("num_bytes", "num_lines")
        )
        assert num_bytes(of_run) + hidden_bytes == len(written.encode())
        assert text_of(of_run).count("\n") + hidden_lines == written.count("\n")
        if notes:
            continue
        for stream in ("stdout", "stderr"):  # text that was held back follows that of the other one
            of_stream = [verb for verb in of_run if verb.stream == stream]
            assert text_of(of_stream) == "".join(
                text for r, to, text, _ in chunks if (r, to) == (run, stream)
            )


def test_a_flood_of_stdout_hides_no_line_of_stderr() -> None:
    gate = Gate(0.0, burst_bytes=1000, bytes_per_s=0)
    gate.admit(1, "stdout", "flood\n" * 10_000, 0.0)
    boom = "ValueError: boom in a thread\n"
    assert gate.admit(1, "stderr", boom, 0.0) == [Output(1, "stderr", boom)]


def test_a_flood_of_two_streams_by_turns_is_bounded() -> None:
    gate, shown, num_written = Gate(0.0), [], 0
    seconds = 10
    for number in range(5000):
        text = f"this is line {number} of very many, all of them of some length\n" * 10
        num_written += len(text)
        stream = "stdout" if number % 2 else "stderr"
        shown += gate.admit(1, stream, text, number * seconds / 5000)
    shown += gate.close()
    limit = 2 * (BURST_BYTES + seconds * BYTES_PER_S)
    assert num_written > 2 * limit
    assert len(text_of(shown)) <= limit + 2 * SAMPLE_BYTES


# ---- the log


def test_a_log_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Log(tmp_path / "rank0.log").append("secret\n")
    finally:
        os.umask(before)
    assert (tmp_path / "rank0.log").stat().st_mode & 0o777 == 0o600


def test_log_drops_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    log = Log(path, limit_bytes=10_000)
    for letter in "abcd":
        log.append(letter * 10_000)
    text, _ = read_log(path, 10**6)
    assert text == "c" * 10_000 + "d" * 10_000


@given(
    pieces=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=40),
    limit=st.integers(50, 200),
)
def test_two_writers_keep_the_newest_when_a_log_is_turned_over(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bool, int]], limit: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "rank0.log"
    writers = {True: Log(path, limit), False: Log(path, limit)}
    written = ""
    for number, (who, size) in enumerate(pieces):
        text = chr(ord("a") + number % 26) * size
        writers[who].append(text)
        written += text
    kept, _ = read_log(path, 10**6)
    assert written.endswith(kept)
    assert len(kept) >= min(limit, len(written))


def test_a_log_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    log = Log(path)
    log.append("before\n")
    path.unlink()
    log.append("after \udc80\n")
    assert path.read_text() == "after ?\n"


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/rank0.log"])
def test_a_log_that_cannot_be_written_loses_text_and_nothing_else(path: str) -> None:
    Log(Path(path)).append("lost\n")


# ---- reading it


def test_reading_goes_on_into_the_log_before(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    (tmp_path / "rank0.log.1").write_text("older-")
    path.write_text("newer")
    assert read_log(path, 8) == ("er-newer", 3)
    assert read_log(path, 1000) == ("older-newer", 0)
    path.unlink()
    assert read_log(path, 1000) == ("older-", 0)


def test_bytes_since_a_position(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank0.log", limit_bytes=10)
    assert log.num_bytes_since(log.position()) == 0
    log.append("before")
    position = log.position()
    log.append("123")
    assert log.num_bytes_since(position) == 3
    log.append("4567")
    log.append("89")  # into the next file
    assert log.num_bytes_since(position) == 2
