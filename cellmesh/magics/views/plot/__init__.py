"""Live plots of numbers that ranks log."""
