"""``%dist_export``: records the cells and magics that a notebook ran on its ranks, and writes them
as a script for torchrun.
"""
