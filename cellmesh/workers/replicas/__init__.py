"""Replicas, which ranks should hold alike: found, compared, made equal, copied to new ranks."""
