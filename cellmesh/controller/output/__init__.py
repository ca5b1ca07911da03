"""What ranks print and display: equal output joined, kept by rank, shown in cell or terminal."""
