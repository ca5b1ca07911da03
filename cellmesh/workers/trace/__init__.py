"""Records a rank's cells and collectives over time, and profiles cells."""
