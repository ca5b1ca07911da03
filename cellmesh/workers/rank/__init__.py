"""The rank: the process that runs user code, with its control thread."""
