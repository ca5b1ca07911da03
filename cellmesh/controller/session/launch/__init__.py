"""Launchers, which start the agents of a mesh, one on each host."""
