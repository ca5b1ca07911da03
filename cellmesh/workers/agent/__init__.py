"""The agent: a small process per host that starts, watches and ends a mesh's other processes."""
