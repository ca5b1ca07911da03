"""Interrupting one run, with the real handler in this process's main thread."""

from __future__ import annotations

import builtins
import importlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cellmesh.workers.rank.interrupts import Interrupts

WAIT_S = 10.0
INTERRUPTS = "cellmesh.workers.rank.interrupts"
RequestIn = Callable[[int, types.FrameType], None]
Patch = pytest.MonkeyPatch


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    interrupts = Interrupts()
    interrupts.install()
    # As the control thread has it done: what is raised in the hook that calls this would be
    # dropped, too.
    interrupts.on_dropped = lambda run, kind: threading.Timer(
        0.01, interrupts.request, [run, kind]
    ).start()
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before[0])
        sys.unraisablehook = before[1]


def from_beside(function: Callable[[], Any]) -> Any:
    """Call a function in another thread, as the control thread does, and give what it returned."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    try:
        thread.join(WAIT_S)
    finally:
        assert not thread.is_alive()
    return results[0]


def do_something() -> None:
    """Enough Python for a pending signal to be handled."""
    for number in range(1000):
        str(number)


def wait_to_be_interrupted() -> None:
    threading.Event().wait(WAIT_S / 5)
    raise AssertionError("nothing interrupted this")


def ask(interrupts: Interrupts, run: int) -> bool:
    """Request an interrupt from beside, and let its signal be handled; return the answer."""
    answer: bool = from_beside(lambda: interrupts.request(run))
    do_something()
    return answer


def be_interrupted(interrupts: Interrupts, run: int) -> None:
    """Have a run interrupted from beside, and wait for it."""
    from_beside(lambda: interrupts.request(run))
    wait_to_be_interrupted()


# ---- a run that runs


def test_a_run_that_swallows_an_interrupt_can_be_interrupted_again(interrupts: Interrupts) -> None:
    interrupts.begin(5)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            be_interrupted(interrupts, 5)
    signal.raise_signal(signal.SIGINT)
    do_something()
    interrupts.end()
    assert interrupts.running == -1
    with interrupts, interrupts:
        do_something()


# ---- other runs, and none


def test_a_run_that_waits_is_cancelled(interrupts: Interrupts) -> None:
    interrupts.begin(5)
    assert ask(interrupts, 6) is False
    interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        interrupts.begin(6)
    interrupts.end()
    assert interrupts.running == -1
    interrupts.begin(6)
    do_something()
    interrupts.end()


def test_unrequested_signals_and_late_requests_interrupt_nothing(interrupts: Interrupts) -> None:
    for change in (lambda: None, lambda: interrupts.begin(5), interrupts.end):
        change()
        signal.raise_signal(signal.SIGINT)
        do_something()
    assert ask(interrupts, 5) is False
    interrupts.begin(6)
    do_something()
    interrupts.end()


# ---- shields


def test_only_the_outermost_shield_lets_go(interrupts: Interrupts) -> None:
    interrupts.begin(5)
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with interrupts:
            with interrupts:
                assert ask(interrupts, 5) is True
            do_something()
            steps.append("still held")
        steps.append("never reached")
    assert steps == ["still held"]
    do_something()
    interrupts.end()


# ---- where Python drops an interrupt


def test_an_interrupt_that_struck_a_finalizer_strikes_again(interrupts: Interrupts) -> None:
    class Slow:
        def __del__(self) -> None:
            ask(interrupts, 5)

    def work() -> None:
        slow = Slow()
        del slow
        wait_to_be_interrupted()

    interrupts.begin(5)
    with pytest.raises(KeyboardInterrupt):
        work()
    interrupts.end()


@pytest.mark.parametrize("may_import_s", [WAIT_S, 0.0])
def test_the_import_of_a_library_ends_before_it_is_interrupted(
    interrupts: Interrupts, tmp_path: Path, monkeypatch: Patch, may_import_s: float
) -> None:
    package = tmp_path / "struck_library"
    package.mkdir()
    (package / "__init__.py").write_text("from . import part\nimport_strike()\nfull = True\n")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(f"{INTERRUPTS}.is_of_library", lambda name: name.startswith(str(tmp_path)))
    monkeypatch.setattr(f"{INTERRUPTS}._IMPORT_S", may_import_s)

    monkeypatch.setattr(builtins, "import_strike", lambda: ask(interrupts, 5), raising=False)

    after: list[str] = []

    def work() -> None:
        importlib.import_module("struck_library")
        after.append("a step")
        wait_to_be_interrupted()

    interrupts.begin(5)
    with pytest.raises(KeyboardInterrupt):
        work()
    interrupts.end()
    assert after == [], "other ranks could have made another number of steps by then"
    assert sys.gettrace() is None
    assert hasattr(sys.modules.pop("struck_library", None), "full") is (may_import_s > 0)
    del sys.modules["struck_library.part"]


# ---- at every moment


def call_struck(
    function: Callable[[], Any], code: types.CodeType, moment: int, strike: Callable[..., None]
) -> tuple[bool, list[int]]:
    """Call a function with a strike at the nth thing that happens in frames of this code.

    Returns:
        Whether a KeyboardInterrupt left it, and the lines that it has run.
    """
    seen: list[int] = []

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not code:
            return None
        seen.append(frame.f_lineno)
        if len(seen) == moment + 1:
            strike(moment, frame)
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        function()
    except KeyboardInterrupt:
        return True, seen
    finally:
        sys.settrace(before)
    return False, seen


@pytest.fixture
def request_in(interrupts: Interrupts, monkeypatch: Patch) -> RequestIn:
    """Requests an interrupt of a run, whose signal is then handled in this very frame."""
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))

    def request(run: int, frame: types.FrameType) -> None:
        sent.clear()
        from_beside(lambda: interrupts.request(run))
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        for number in sent:
            handler(number, frame)

    return request


def test_run_is_interrupted_at_every_instant_of_its_begin(
    interrupts: Interrupts, request_in: RequestIn
) -> None:
    lost = []
    for run in range(100):
        was_interrupted, seen = call_struck(
            lambda run=run: interrupts.begin(run), Interrupts.begin.__code__, run, request_in
        )
        interrupts.end()
        if len(seen) <= run:  # it has no more moments
            break
        if not was_interrupted:
            lost.append(seen[run])
    assert 2 < run < 99
    assert lost == [], f"requests at these lines of `begin` had no effect: {lost}"


def test_run_has_ended_at_every_instant_of_its_end(
    interrupts: Interrupts, request_in: RequestIn
) -> None:
    still_running = []
    for run in range(100):
        interrupts.begin(run)
        _, seen = call_struck(interrupts.end, Interrupts.end.__code__, run, request_in)
        if len(seen) <= run:
            break
        if interrupts.running != -1:
            still_running.append(seen[run])
        interrupts.running = -1
    assert 2 < run < 99
    assert still_running == [], (
        f"requests at these lines of `end` left the run running: {still_running}"
    )


def test_a_request_that_meets_the_begin_is_not_lost(
    interrupts: Interrupts, monkeypatch: Patch
) -> None:
    """The run begins after the request has looked whether it has, and before it says that it is
    cancelled.
    """

    class Meeting(dict[int, type[KeyboardInterrupt]]):
        def __setitem__(self, run: int, kind: type[KeyboardInterrupt]) -> None:
            interrupts.begin(run)
            super().__setitem__(run, kind)

    monkeypatch.setattr(interrupts, "_cancelled", Meeting())
    with pytest.raises(KeyboardInterrupt):
        interrupts.request(5)
    interrupts.end()


def torch_modes() -> tuple[bool, ...]:
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return grad, inference, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("place", "event"), [("__enter__", "return"), ("__exit__", "call")])
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")]
)
def test_torch_is_left_in_its_modes_by_an_interrupt(
    interrupts: Interrupts, mode: Callable[[], Any], place: str, event: str
) -> None:
    def strike(frame: types.FrameType, happens: str, _: object) -> None:
        code = frame.f_code
        if (code.co_name, happens) == (place, event) and "/torch/" in code.co_filename:
            sys.setprofile(None)
            from_beside(lambda: interrupts.request(5))

    def compute() -> None:
        sys.setprofile(strike)
        with mode():
            pass
        wait_to_be_interrupted()

    # What a failure of this test leaves is undone.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        before = torch_modes()
        interrupts.begin(5)
        try:
            with pytest.raises(KeyboardInterrupt):
                compute()
            assert torch_modes() == before
        finally:
            sys.setprofile(None)
            interrupts.end()
