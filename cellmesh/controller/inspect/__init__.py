"""Inspects values on ranks, from the notebook."""
