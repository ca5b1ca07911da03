"""Reads the stacks of a rank's threads while they run."""
