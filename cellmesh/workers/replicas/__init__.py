"""What ranks should hold alike: found, compared, made equal, and copied to ranks that are new."""
