"""Completes and explains names on ranks, and completes the magics' options."""
