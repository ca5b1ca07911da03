"""Records a rank's cells and collectives over time."""
