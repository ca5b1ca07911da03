"""Completes and explains names of ranks in the notebook, and completes the magics' options."""
