"""``cellmesh doctor``: what this machine can run."""
