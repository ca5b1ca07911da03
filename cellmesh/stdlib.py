"""References to functions of the standard library, taken when cellmesh is imported, so that user
code which patches `time` or `os` does not change them.

User code replaces their functions, for a test or for good: freezegun stops `time.monotonic`,
``mock.patch`` exchanges `os.kill` or `socket.socket`. The code that interrupts, releases and heals
ranks calls these copies instead. ``from time import monotonic`` does not suffice: freezegun
replaces such names in every module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os as os
    import select as select
    import signal as signal
    import socket as socket
    import threading as threading
    import time as time
    from builtins import open as open
else:
    import os
    import select
    import signal
    import socket
    import threading
    import time
    from types import SimpleNamespace

    open = open
    os, select, signal, socket, threading, time = (
        SimpleNamespace(**vars(module)) for module in (os, select, signal, socket, threading, time)
    )
