"""``python -m tests.faults``: the table of faults, in full or in part; see `--help`."""

from __future__ import annotations

import sys

from .table import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
