"""The session of a process with one mesh, from its start or attach to its end."""
