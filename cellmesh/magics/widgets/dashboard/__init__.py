"""The mesh dashboard."""
