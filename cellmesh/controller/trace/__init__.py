"""Timeline of the ranks' last cells, and profiles of cells."""
