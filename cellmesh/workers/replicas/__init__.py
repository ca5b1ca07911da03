"""Replicas: found, compared, made equal, and copied to new ranks."""
