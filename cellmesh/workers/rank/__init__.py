"""The rank: the process that runs users' code, and its control thread."""
