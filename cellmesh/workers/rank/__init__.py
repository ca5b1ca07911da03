"""A rank: the process that runs user code, with a control thread that answers beside it."""
