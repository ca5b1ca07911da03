"""The timeline of the last cells, as a widget."""
