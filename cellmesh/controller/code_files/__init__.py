"""Makes the modules beside the notebook the same on all hosts of a mesh."""
