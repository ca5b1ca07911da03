"""What ranks print and display: folded, kept by rank, shown in a cell or a terminal."""
