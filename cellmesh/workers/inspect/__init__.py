"""What a rank tells of its values, names and past when it is asked to `Look`."""
