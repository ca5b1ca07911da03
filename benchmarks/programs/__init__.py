"""Training programs as people write them: run whole as a cell, and as a script under torchrun."""
