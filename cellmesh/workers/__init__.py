"""The processes on a mesh's hosts: agent, zygote and ranks. Imports nothing of the controller."""
