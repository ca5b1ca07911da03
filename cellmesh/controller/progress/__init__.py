"""Progress bars of ranks: one for the mesh."""
