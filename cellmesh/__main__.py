"""``python -m cellmesh`` is the ``cellmesh`` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
