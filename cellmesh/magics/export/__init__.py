"""``%dist_export``: records what a notebook ran on its ranks, and writes it as a script for
torchrun.
"""
