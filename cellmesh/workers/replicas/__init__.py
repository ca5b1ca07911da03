"""Replicas, values that should be equal on several ranks: found, compared, synced, copied."""
