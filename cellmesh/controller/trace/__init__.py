"""What ranks did over time: the timeline of the last cells, and profiles of cells."""
