"""Output of ranks: joins equal output, keeps it by rank, and shows it in a cell or terminal."""
