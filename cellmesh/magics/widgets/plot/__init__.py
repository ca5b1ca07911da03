"""Live plots of what ranks log."""
