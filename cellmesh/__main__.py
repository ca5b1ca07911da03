"""Runs the ``cellmesh`` command, as ``python -m cellmesh``."""

from .cli.main import main

if __name__ == "__main__":
    main()
