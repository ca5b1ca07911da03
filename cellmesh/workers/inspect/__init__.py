"""Answers queries about a rank's values, names and history."""
