"""The tensor inspector."""
