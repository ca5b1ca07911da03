"""Inspects values on ranks."""
