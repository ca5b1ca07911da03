"""A rank's stdout and stderr: what is printed goes to the log and out, in order, to its own run."""

from __future__ import annotations

import collections
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellmesh.controller.ranks import seed_ranks
from cellmesh.wire.codec import Parcel, at_agent_from_rank, encode
from cellmesh.wire.messages import Done
from cellmesh.wire.verbs import Display, DisplayKind, Output, Skipped
from cellmesh.workers.rank.stdout import Log
from cellmesh.workers.rank.streams import DISPLAY_BYTES, Pump, RankStream
from cellmesh.workers.run_tracker import RunTracker, name_of

WAIT_S = 10.0


class Rank:
    """A pump with its streams, and what it has posted."""

    def __init__(self, directory: Path) -> None:
        self.log_path = directory / "rank0.log"
        self.posts: list[list[Any]] = []
        self.tracker = RunTracker()
        self.pump = Pump(self._post, Log(self.log_path))
        self.out = RankStream("stdout", self.pump, self.tracker)
        self.err = RankStream("stderr", self.pump, self.tracker)

    def _post(self, parcels: Any) -> None:
        # As the rank does: what cannot be encoded cannot be posted.
        self.posts.append([verb for verb, _ in at_agent_from_rank().decode(encode(parcels))])

    @property
    def verbs(self) -> list[Any]:
        return [verb for post in self.posts for verb in post]

    def text(self, run: int, stream: str = "stdout") -> str:
        return "".join(
            verb.text
            for verb in self.verbs
            if isinstance(verb, Output) and (verb.run, verb.stream) == (run, stream)
        )

    def end(self, run: int) -> None:
        self.tracker.enter(-1)
        self.pump.answer(Parcel(Done(run)))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    rank.tracker.enter(1)
    yield rank
    rank.tracker.enter(-1)


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


# ---- order


def test_a_signal_handler_may_flush_in_the_middle_of_a_flush(rank: Rank) -> None:
    class Pieces(collections.deque[Any]):
        def popleft(self) -> Any:
            piece = super().popleft()
            rank.out.flush()  # a signal handler runs here
            return piece

    rank.pump._pieces = Pieces([(1, "stdout", "a\n"), (1, "stdout", "b\n")])
    rank.end(1)
    assert sorted(rank.text(1).split()) == ["a", "b"]


def test_the_first_line_goes_out_at_once_and_the_others_when_flushed(rank: Rank) -> None:
    print("line 0", file=rank.out)
    assert rank.text(1).startswith("line 0")
    for number in range(1, 10):
        print("line", number, file=rank.out)
    rank.out.flush()
    assert rank.text(1) == "".join(f"line {number}\n" for number in range(10))


def test_flushed_lines_are_at_once_in_the_log_and_sent(rank: Rank) -> None:
    expected = "".join(f"line {number}\n" for number in range(20))
    for number in range(20):
        print("line", number, file=rank.out, flush=True)
    assert rank.log_path.read_text() == rank.text(1) == expected
    num_posts = len(rank.posts)
    rank.out.flush()
    assert len(rank.posts) == num_posts


def test_an_answer_may_wait_for_the_next(rank: Rank) -> None:
    rank.pump.answer(Parcel(Done(1)), more_follows=True)
    assert rank.posts == []
    rank.pump.answer(Parcel(Done(2)))
    assert rank.verbs == [Done(1), Done(2)]


@pytest.mark.parametrize("kind", ["display", "result"])
@pytest.mark.parametrize("sizes", [[DISPLAY_BYTES + 1], [DISPLAY_BYTES // 20] * 60])
def test_displays_are_bounded(rank: Rank, kind: DisplayKind, sizes: list[int]) -> None:
    for size in sizes:
        bundle = b'{"data":{"text/plain":"a","text/html":"%s"}}' % (b"x" * size)
        rank.pump.display(Parcel(Display(1, kind, bundle)), lambda: "<Figure>" + "x" * 10_000)
    rank.end(1)
    shown = [verb for verb in rank.verbs if isinstance(verb, Display)]
    assert sum(len(verb.bundle) for verb in shown) <= 1.5 * DISPLAY_BYTES
    assert len(shown) < len(sizes)
    log = rank.log_path.read_text()
    assert log.count("<Figure>") == len(sizes) - len(shown)
    assert len(log) < 1300 * len(sizes)
    assert log.endswith(" MiB/s)\n")
    assert f"({len(bundle):,} bytes, not shown: a rank's displays pass up to 32 MiB at once" in log


def test_everything_is_in_the_log(rank: Rank) -> None:
    flood = "line\n" * 200_000
    rank.out.write(flood)
    rank.end(1)
    assert rank.log_path.read_text() == flood
    assert len(rank.text(1)) < len(flood)
    assert any(isinstance(verb, Skipped) for verb in rank.verbs)
    assert rank.verbs[-1] == Done(1)


# ---- whose text it is


def test_a_thread_belongs_to_its_run(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # restored at the end
    rank.tracker.follow_threads()
    go = threading.Event()

    def print_late() -> None:
        assert go.wait(WAIT_S)
        print("late", file=rank.out)
        in_thread(lambda: print("later", file=rank.out))

    thread = threading.Thread(target=print_late)
    thread.start()
    rank.end(1)
    rank.tracker.enter(2)
    go.set()
    thread.join(WAIT_S)
    rank.end(2)
    assert rank.text(1) == "late\nlater\n"
    assert rank.text(2) == ""


def test_between_runs_text_belongs_to_none(rank: Rank) -> None:
    rank.end(1)
    print("nobody's", file=rank.out)
    rank.pump.send(Parcel(Done(9)))
    assert rank.text(-1) == "nobody's\n"


# ---- a stream as others see it


def test_stdout_is_a_text_stream(rank: Rank) -> None:
    assert isinstance(rank.out, io.TextIOBase)
    assert rank.out.writable()
    assert not rank.out.isatty()
    assert (rank.out.encoding, rank.out.name, rank.err.name) == ("utf-8", "<stdout>", "<stderr>")
    assert (rank.out.fileno(), rank.err.fileno()) == (1, 2)
    assert rank.out.write("four") == 4
    rank.out.writelines(["a\n", "b\n"])
    rank.out.flush()
    rank.end(1)
    assert rank.text(1) == "foura\nb\n"


def test_bytes_go_through_the_buffer_of_stdout(rank: Rank) -> None:
    data = "größe 語\n".encode()
    for byte in data:  # a character may come in pieces
        assert rank.out.buffer.write(bytes((byte,))) == 1
    rank.out.buffer.write(b"a\xffb\n")
    rank.end(1)
    assert rank.text(1) == "größe 語\na\ufffdb\n"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (name_of, "name_of"),
        (RunTracker.enter, "RunTracker.enter"),
        (RunTracker(), "RunTracker"),
        (seed_ranks, ""),  # magics call such functions, and no cell of a timeline is theirs
    ],
)
def test_calls_have_the_name_of_their_function(function: Any, name: str) -> None:
    assert name_of(function) == name


def test_all_text_of_a_script_is_sent(rank: Rank) -> None:
    rank.pump.is_whole = True
    rank.out.write("line\n" * 200_000)
    rank.end(1)
    assert rank.text(1) == "line\n" * 200_000
    assert not any(isinstance(verb, Skipped) for verb in rank.verbs)


def test_stream_has_the_attributes_of_pythons_own(rank: Rank) -> None:
    rank.out.reconfigure(line_buffering=True)
    assert (rank.out.name, vars(rank.out)["mode"], rank.out.fileno()) == ("<stdout>", "w", 1)
    assert not rank.out.isatty()
    rank.out.is_terminal = True
    assert rank.out.isatty()
