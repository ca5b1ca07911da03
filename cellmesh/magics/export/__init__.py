"""``%dist_export``: what a notebook ran on its ranks, recorded, and written as a script for
torchrun.
"""
