"""Completion and help from a rank's namespace."""
