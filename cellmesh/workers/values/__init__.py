"""Large values on a rank."""
