"""A mesh's life in the notebook's process: started or attached to, connected, ended."""
