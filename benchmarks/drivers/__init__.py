"""One module a contestant, each run by that contestant's own interpreter in a process of its own.

A driver starts its contestant, measures it and prints one line of JSON: measure -> number, in
seconds, bytes or calls per second. What they share (`protocol`, `kernel`) uses the standard library
and, for the kernel, jupyter_client, so that it runs in every environment.
"""
