"""The timeline of the last cells."""
