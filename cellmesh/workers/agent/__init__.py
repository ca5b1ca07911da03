"""The agent: one small process a mesh, which starts, watches and ends the others for the
controller.
"""
