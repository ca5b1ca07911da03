"""Completes and explains names from ranks in the notebook, and completes the magics' options."""
