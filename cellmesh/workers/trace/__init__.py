"""What a rank records of its cells and its collectives over time."""
