"""Launchers: ways to start an agent, one process a host."""
