"""The controller: meshes, runs and output in the notebook's process; it does not import
`cellmesh.workers`.
"""
