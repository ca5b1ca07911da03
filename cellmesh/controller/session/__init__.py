"""A session: one mesh in the notebook's process, started or attached to, connected, ended."""
