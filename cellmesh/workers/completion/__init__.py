"""Completes and explains names from a rank's namespace."""
