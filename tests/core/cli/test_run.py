"""The decisions of `cellmesh run`: its command line, and the end of a script."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from cellmesh.cli.execution import react, write_whole
from cellmesh.cli.launch import Launch, Script, chosen_streams, read_launch
from cellmesh.cli.run import run
from cellmesh.cli.script_output import describe_end, status_of
from cellmesh.errors import MeshUsageError
from cellmesh.wire.messages import Died, Done, Failed


def launch(line: str, project: dict[str, Any] | None = None) -> Launch:
    """What the command would do, without doing it."""
    context = run.make_context("run", line.split())
    given = {n: v for n, v in context.params.items() if v is not False and v not in (None, ())}
    return read_launch(given.pop("words", ()), given, project or {})


def test_options_precede_the_script_and_the_rest_is_the_scripts() -> None:
    read = launch("-n 4 --backend gloo train.py -n 8 --lr 0.1 --on x -- -m")
    assert read.script == Script("train.py", ("-n", "8", "--lr", "0.1", "--on", "x", "--", "-m"))
    assert (read.num_ranks, read.start) == (4, {"backend": "gloo"})
    assert launch("-n 0 train.py").num_ranks == 0, "which a start refuses"
    assert launch("-n 2 -m pkg.train --x").script == Script("pkg.train", ("--x",), True)


def test_torchruns_spelling() -> None:
    for spelling in ("--nproc-per-node 4", "--nproc_per_node=4", "--standalone --nproc_per_node 4"):
        assert launch(f"{spelling} --nnodes 1 train.py").num_ranks == 4
    on_hosts = launch("--nproc-per-node 4 --hosts a,b train.py")
    assert (on_hosts.num_ranks, on_hosts.start["nproc_per_host"]) == (None, 4)
    assert launch("--redirects 3 --log_dir logs t.py").log_dir == "logs"
    with pytest.raises(MeshUsageError, match="-n and --nproc-per-node"):
        launch("-n 4 --nproc-per-node 4 train.py")
    with pytest.raises(click.NoSuchOption, match="--nprocs"):
        launch("--nprocs 4 train.py")


def test_without_a_number_there_is_one_rank_unless_the_project_says_more() -> None:
    assert launch("train.py").num_ranks == 1
    assert launch("--mesh dp=2 train.py").num_ranks is None
    assert launch("train.py", {"num_ranks": 8}).num_ranks is None
    assert launch("train.py", {"backend": "gloo"}).num_ranks == 1
    assert launch("train.py").keeps_warm
    assert not launch("train.py", {"prestart": False}).keeps_warm
    assert not launch("--no-keep-warm train.py").keeps_warm


def test_a_living_mesh_takes_no_options_of_a_start() -> None:
    assert launch("--on dev --wait train.py").on == "dev"
    for line in ("-n 4", "--backend gloo", "--keep 30m"):
        with pytest.raises(MeshUsageError, match="--on dev runs on ranks that are there"):
            launch(f"--on dev {line} train.py")
    with pytest.raises(MeshUsageError, match="--watch starts ranks for each run, and --keep"):
        launch("--watch --keep 30m train.py")
    with pytest.raises(MeshUsageError, match=r"name a script: cellmesh run -n 4 train\.py"):
        launch("-n 4")


def test_a_script_is_checked_before_any_rank_starts(tmp_path: Path) -> None:
    def why_not(name: str, content: bytes | None = None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(MeshUsageError) as caught:
            Script(str(tmp_path / name)).check()
        return str(caught.value).replace(f"{tmp_path}/", "")

    (tmp_path / "train.py").write_text("print('\N{SNOWMAN}', '\\d')")
    Script(str(tmp_path / "train.py")).check()
    assert why_not("trian.py") == "there is no script trian.py; did you mean 'train.py'?"
    assert "is a directory: name a script in it" in why_not(".")
    assert why_not("a.ipynb", b"{}") == "a.ipynb is a notebook: `jupyter execute a.ipynb` runs it"
    assert why_not("b.py", b"x = 1\nprint(\n") == "b.py:2: SyntaxError: '(' was never closed"
    assert why_not("c.py", b"if 1:\nx").startswith("c.py:2: IndentationError: expected")
    for content in (b"\x7fELF\x00\x00\x01", b"\xff\xfe\x00"):
        assert why_not("program", content) == "program is no Python source"
    Script("json.tool", is_module=True).check()
    with pytest.raises(MeshUsageError, match="there is no module 'nonesuch'"):
        Script("nonesuch.main", is_module=True).check()


def test_streams_go_where_torchrun_writes_them() -> None:
    def streams(line: str) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
        files, hidden = chosen_streams(launch(f"{line} train.py"), 2)
        return {**files}, {rank: {*names} for rank, names in hidden.items() if names}

    both = {"stdout", "stderr"}
    assert streams("-n 2") == ({}, {})
    assert streams("--log-dir d") == ({0: both, 1: both}, {})
    assert streams("-r 1") == ({0: {"stdout"}, 1: {"stdout"}}, {0: {"stdout"}, 1: {"stdout"}})
    assert streams("-r 3 -t 0:2") == ({0: both, 1: both}, {0: {"stdout"}, 1: both})
    assert streams("-n 2 --local-ranks-filter 1") == ({}, {0: both})
    for line, message in (("-t 9", "--tee 9: say 1"), ("--local-ranks-filter 7", "is no rank 7")):
        with pytest.raises(MeshUsageError, match=message):
            launch(f"-n 2 {line} train.py")  # before ranks start


def test_steps_at_signals() -> None:
    ctrl_c, term, change = 2, 15, -1
    assert react(0, ctrl_c, 9, False) == (ctrl_c, "interrupt")
    assert react(0, term, 9, False) == (term, "signal")
    assert react(0, term, 9, True) == (term, "interrupt")
    for is_shared, again in ((False, "leave"), (True, "interrupt")):
        assert react(ctrl_c, ctrl_c, 0, is_shared) == (ctrl_c, again)
        assert react(term, term, 0, is_shared) == (term, ""), "timeout(1) sends two"
        assert react(term, term, 5, is_shared) == (term, again)
        assert react(change, change, 5, is_shared) == (change, "")
    assert react(change, ctrl_c, 0, False) == (ctrl_c, "leave"), "and not another run"
    assert react(change, ctrl_c, 0, True) == (ctrl_c, ""), "a second interrupt would kill ranks"
    assert react(0, 13, 9, True) == (13, "leave")


def failed(text: str, line: int = 3, **more: Any) -> Failed:
    return Failed(1, "ValueError", text, "", line, **more)


def test_the_status_is_that_of_the_first_rank_that_failed_itself() -> None:
    done, released = Done(1), failed("all_reduce", released=True)
    assert status_of({0: done, 1: done}) == 0
    assert (
        status_of({2: released, 1: failed("no", status=4), 3: Died(3, "exited with code 9", "")})
        == 4
    )
    assert status_of({0: done, 1: Died(1, "exited with code 3", "")}) == 3
    assert status_of({0: Died(0, "was killed by SIGSEGV", ""), 1: released}) == 139
    assert status_of({0: Died(0, "was killed by signal 35", "")}) == 163
    assert status_of({0: Failed(1, "KeyboardInterrupt", "", "", 1)}) == 130
    assert status_of({0: Died(0, "ended", "")}) == 1
    assert status_of({1: done, 0: released}) == 1  # rank 1 has ended before a collective


def test_the_last_line_names_who_failed_and_who_waited() -> None:
    ended = {1: failed("no"), 0: failed("waited in all_reduce", released=True), 2: Done(1)}
    assert describe_end(ended) == (
        "rank 1 raised ValueError: no (line 3); rank 0 waited in all_reduce at line 3 and was "
        "released; rank 2 finished"
    )
    assert describe_end({0: Done(1)}) == ""
    ended = {0: Failed(1, "KeyboardInterrupt", "interrupted in the cell", "", 3)}
    assert describe_end(ended) == "rank 0 raised KeyboardInterrupt: interrupted (line 3)"


def test_a_descriptor_that_does_not_block_gets_all_bytes() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    data = bytes(1 << 20)
    writer = threading.Thread(target=write_whole, args=(write_end, data))
    writer.start()
    with open(read_end, "rb") as file:
        assert file.read(len(data)) == data
    writer.join()
    os.close(write_end)
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space"):
        write_whole(full.fileno(), b"x")


def test_output_is_dropped_whose_reader_is_blocked_while_a_signal_waits() -> None:
    read_end, write_end = os.pipe()
    looked: list[bool] = []

    def may_drop() -> bool:
        looked.append(True)
        return len(looked) > 1

    with open(read_end), open(write_end, "wb", buffering=0), pytest.raises(TimeoutError):
        write_whole(write_end, bytes(1 << 20), may_drop)
    assert len(looked) == 2
