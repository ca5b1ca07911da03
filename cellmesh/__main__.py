"""Runs the ``cellmesh`` command, as ``python -m cellmesh``."""

import gc
import signal


def run() -> None:
    """Run the command; Ctrl-C during its imports ends it as it ends a program in C, for Python's
    exception would be printed, or be lost in a callback of the import system.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(20_000)  # imports allocate much, and free little: 10 ms
    from .cli.main import main

    main()


if __name__ == "__main__":
    run()
