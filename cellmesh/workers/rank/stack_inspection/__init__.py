"""Reads where a rank's threads are, beside the code that they run."""
