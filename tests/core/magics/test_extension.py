"""The extension of a notebook's kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

from cellmesh.magics.extension import wake_at_signals


def test_a_signal_wakes_the_event_loop_for_a_handler_that_only_adds_a_callback() -> None:
    async def wait() -> bool:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def handle(*_: Any) -> None:  # as ipykernel's, while a cell is awaited
            loop.call_soon(stopped.set)

        before = signal.signal(signal.SIGUSR1, handle)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            await asyncio.wait_for(stopped.wait(), 30)
        finally:
            signal.signal(signal.SIGUSR1, before)
        return loop.time() - began < 15

    began = 0.0

    async def main() -> bool:
        nonlocal began
        began = asyncio.get_running_loop().time()
        wake_at_signals()
        wake_at_signals()  # the extension is loaded again
        return await wait()

    before = signal.set_wakeup_fd(-1)
    try:
        assert asyncio.run(main())
    finally:
        os.close(signal.set_wakeup_fd(before))


def test_without_a_loop_nothing_is_done() -> None:
    before = signal.set_wakeup_fd(-1)
    try:
        wake_at_signals()
        assert signal.set_wakeup_fd(before) == -1
    finally:
        signal.set_wakeup_fd(before)
