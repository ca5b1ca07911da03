"""Copies the user's modules to all hosts of a mesh."""
