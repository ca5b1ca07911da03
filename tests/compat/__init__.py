"""What holds on every supported Python and torch: `python -m tests.compat` runs `selection.txt` in
each.
"""
