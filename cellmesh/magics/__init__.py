"""The IPython extension: magics as a thin layer over `cellmesh.Mesh`, without logic of its own."""
