"""Decides what the controller does with its mesh: pure, without sockets, threads or clocks."""
