"""Runs the ``cellmesh`` command, as ``python -m cellmesh``."""

import sys


def run() -> None:
    """Run the command; Ctrl-C during its imports ends it without a traceback."""
    try:
        from .cli.main import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
