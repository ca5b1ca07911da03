"""Finds, compares, syncs and copies replicas: values that should be equal on several ranks."""
