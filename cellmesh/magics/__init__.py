"""The IPython extension: a thin layer over `cellmesh.Mesh` that holds no logic of its own."""
