"""Large values on the notebook's side."""
