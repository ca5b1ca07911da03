"""Progress bars of ranks, shown as one bar for the mesh."""
