"""The controller: meshes, runs and output in the notebook's process. It never imports
`cellmesh.workers`.
"""
