"""Widgets that are made on ranks, in the notebook."""
