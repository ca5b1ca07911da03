"""The session of a process with one mesh: from the start of the mesh, or an attach to it, to its
end.
"""
