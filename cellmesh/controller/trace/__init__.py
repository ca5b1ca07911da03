"""What ranks did over time, joined: the timeline of the last cells, and profiles."""
