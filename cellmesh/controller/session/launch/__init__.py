"""Ways to start an agent; each only has to run one process a host."""
