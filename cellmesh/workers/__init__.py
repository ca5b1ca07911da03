"""Code of the processes on a mesh's hosts: agents, ranks, and zygotes, which fork ranks. It imports
nothing from the controller.
"""
